"""Names, configurations and refusals, before anything is written."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.config import RopeConfig
from eagle3.errors import ConfigError, DataError
from eagle3.model.drafter import Drafter
from eagle3.model.layers import NormLayout
from eagle3.model.rope import frequencies
from eagle3.names import Arch, ExportTarget, NormPreset, RopeType
from eagle3.serving.config import ExportConfig
from eagle3.serving.independent_forward import inverse_frequencies
from eagle3.serving.layout import check_weights, name_table, weight_shapes
from eagle3.serving.llama_form import rope_fields
from eagle3.serving.plan import plan_export
from eagle3.serving.recorded import recorded_lengths
from tests.helpers import TINY
from tests.serving.exports import KIMI, tiny_source

LEAVES = [
    "hidden_norm",
    "input_layernorm",
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "post_attention_layernorm",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.v_proj",
]
LAYOUTS = [
    NormLayout(residual, before_fc, fc_norm, output)
    for residual, before_fc, fc_norm, output in product([False, True], repeat=4)
    if not (before_fc and fc_norm)
]


@pytest.mark.parametrize(
    ("target", "prefix"),
    [
        pytest.param(ExportTarget.both, "midlayer", id="both"),
        pytest.param(ExportTarget.sglang, "midlayer", id="sglang"),
        pytest.param(ExportTarget.vllm, "midlayer", id="vllm"),
        pytest.param(ExportTarget.speculators, "layers.0", id="speculators"),
    ],
)
def test_the_names_in_the_file(target: ExportTarget, prefix: str) -> None:
    plan = plan_export(tiny_source(), ExportConfig(target=target))
    layer = [f"{prefix}.{leaf}.weight" for leaf in LEAVES]
    top = ["d2t", "fc.weight", "lm_head.weight", "norm.weight", "t2d"]
    assert sorted(plan.tensors) == sorted(layer + top)
    assert plan.tensors["d2t"].dtype == torch.int64
    assert plan.tensors["t2d"].dtype == torch.bool


@pytest.mark.parametrize("target", list(ExportTarget), ids=str)
@pytest.mark.parametrize("norms", LAYOUTS, ids=lambda n: "".join("01"[v] for v in vars(n).values()))
def test_names_go_both_ways_for_every_layout(target: ExportTarget, norms: NormLayout) -> None:
    for arch in Arch:
        model = replace(TINY, arch=arch)
        parameters = dict(Drafter(model, norms).named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        assert weight_shapes(model, norms) == shapes
        table = name_table(target, shapes)
        assert {table.to_ours[table.to_file[name]] for name in shapes} == set(shapes)
        assert len(table.to_ours) == len(shapes)


def test_a_full_vocabulary_has_no_map() -> None:
    source = tiny_source(replace(TINY, draft_vocab_size=TINY.vocab_size))
    assert plan_export(source, ExportConfig()).tensors.keys().isdisjoint({"d2t", "t2d"})


@pytest.mark.parametrize(
    ("norms", "target", "oldest", "said"),
    [
        pytest.param("speculators", "both", "0.5.23", "norm_before_residual: no SGLang", id="res"),
        pytest.param("speculators", "sglang", "0.5.14", "min_sglang=0.5.18", id="before fc"),
        pytest.param("eagle3_1", "both", "0.5.9", "fc_norm: SGLang reads it from 0.5.12", id="fc"),
        pytest.param("eagle3_1", "both", "0.5.9", "norm_output: SGLang reads it", id="output"),
    ],
)
def test_a_norm_that_sglang_would_ignore_is_refused_with_what_serves_it(
    norms: str, target: str, oldest: str, said: str
) -> None:
    layout = NormLayout.preset(NormPreset(norms))
    settings = ExportConfig(target=ExportTarget(target), min_sglang=oldest)
    with pytest.raises(ConfigError, match=said) as raised:
        plan_export(tiny_source(norms=layout), settings)
    assert "target=vllm" in str(raised.value)


def test_each_norm_flag_reaches_both_forms() -> None:
    for norms in LAYOUTS:
        source = tiny_source(norms=norms)
        for target in (ExportTarget.vllm, ExportTarget.speculators):
            config = plan_export(source, ExportConfig(target=target)).config
            assert {flag: config[flag] for flag in asdict(norms)} == asdict(norms)
    newest = ExportConfig(min_sglang="0.5.18")
    before_fc = NormLayout(norm_before_fc=True, norm_output=True)
    assert plan_export(tiny_source(norms=before_fc), newest).config["norm_before_fc"]
    with pytest.raises(ValueError, match="exclude each other"):
        NormLayout(norm_before_fc=True, fc_norm=True)


def test_layers_of_other_kinds_are_refused() -> None:
    qwen = tiny_source(replace(TINY, arch=Arch.qwen3))
    with pytest.raises(ConfigError, match="drops them"):
        plan_export(qwen, ExportConfig())
    plain = plan_export(qwen, ExportConfig(target=ExportTarget.vllm))
    assert plain.config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    window = tiny_source(replace(TINY, sliding_window=8))
    with pytest.raises(ConfigError, match="attend to everything"):
        plan_export(window, ExportConfig(target=ExportTarget.vllm))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"layer.mlp.up_proj.bias": torch.ones(48)}, "a bias; SGLang", id="bias"),
        pytest.param({"embed_tokens.weight": torch.ones(50, 32)}, "only vLLM", id="embedding"),
        pytest.param({"verifier_norm.weight": torch.ones(32)}, "no engine has", id="unknown"),
        pytest.param({"fc.weight": torch.ones(32, 64)}, r"\[32, 64\], expected", id="two layers"),
        pytest.param({"norm.weight": torch.full((32,), torch.nan)}, "holds NaN", id="nan"),
        pytest.param({"lm_head.weight": None}, "lm_head.weight is missing", id="no head"),
    ],
)
def test_a_checkpoint_of_another_drafter_is_refused(
    change: dict[str, torch.Tensor | None], said: str
) -> None:
    source = tiny_source()
    all_tensors = {**source.tensors, "d2t": source.vocab.d2t, "t2d": source.vocab.t2d, **change}
    tensors = {name: tensor for name, tensor in all_tensors.items() if tensor is not None}
    with pytest.raises(DataError, match=said):
        check_weights("it", tensors, TINY, source.norms)


ROPES = st.sampled_from(list(RopeType)).flatmap(
    lambda kind: st.builds(
        RopeConfig,
        theta=st.sampled_from([1e4, 5e4, 1e6]),
        type=st.just(kind),
        factor=st.sampled_from([1.0, 4.0, 64.0]),
        original_max_position_embeddings=st.sampled_from([512, 4096]),
        low_freq_factor=st.just(1.0),
        high_freq_factor=st.sampled_from([4.0, 8.0]),
        beta_fast=st.sampled_from([1.5, 32.0]),
        beta_slow=st.just(1.0),
    )
)


@given(ROPES, st.sampled_from([8, 64, 128]))
def test_rope_says_the_same_in_both_places(rope: RopeConfig, head_dim: int) -> None:
    fields = rope_fields(rope)
    old = {**(fields["rope_scaling"] or {"rope_type": "default"})}
    assert {**old, "rope_theta": fields["rope_theta"]} == fields["rope_parameters"]
    theirs, scale = inverse_frequencies(fields["rope_parameters"], head_dim)
    ours, own_scale = frequencies(rope, head_dim)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=0)
    assert scale == pytest.approx(own_scale)


def test_ids_stand_where_each_engine_looks() -> None:
    source = tiny_source(verifier=KIMI, aux_layer_ids=(2, 30, 58))
    both = plan_export(source, ExportConfig()).config
    assert both["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
    assert both["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    alone = plan_export(source, ExportConfig(target=ExportTarget.vllm)).config
    assert "eagle_config" not in alone


def test_what_the_user_has_to_know_is_said() -> None:
    model = replace(TINY, max_position_embeddings=262144)
    source = tiny_source(model, verifier=KIMI, aux_layer_ids=(3, 31, 59))
    said = "\n".join(plan_export(source, ExportConfig()).warnings)
    assert "no single file serves all releases" in said
    assert "262,144, but the longest trained context has 512 tokens" in said
    assert "compressed-tensors" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param({"min_sglang": "latest"}, "a release such as 0.5.9", id="no number"),
        pytest.param({"min_sglang": "0.5.8"}, "rules are not known", id="old sglang"),
        pytest.param({"min_vllm": "0.11.0"}, "min_vllm=0.33.0", id="old vllm"),
        pytest.param({"num_speculative_tokens": 0}, "expected 1 or more", id="no tokens"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_export(tiny_source(), ExportConfig(**settings))  # type: ignore[arg-type]


@given(st.lists(st.integers(2, 200_000), min_size=1, max_size=30), st.integers(16, 8192))
def test_lengths_are_counted_once_and_cut_at_the_pack(lengths: list[int], rows: int) -> None:
    found = recorded_lengths(np.array(lengths), rows)
    assert sum(found["histogram"].values()) == found["documents"] == len(lengths)
    assert found["longest_trained"] == min(max(lengths), rows + 1)
    below = sum(n for name, n in found["histogram"].items() if name in ("up to 512", "up to 1024"))
    assert below == sum(length <= 1024 for length in lengths)
