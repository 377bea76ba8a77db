"""States from SGLang: what arrives is what the engine computed, whatever happens on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import VerifierError
from eagle3.names import LastHidden, LayerIdConvention, ServerForm
from eagle3.verifier.base import VerifierDescription, describe_verifier
from eagle3.verifier.server import ServerVerifier
from eagle3.verifier.server_requests import Outcome, ServerSettings, capture_documents
from eagle3.verifier.sglang import (
    BEFORE_NORM_CLASSES,
    SglangPair,
    SglangSource,
    entering_ids,
)
from tests.verifier.servers import (
    CONTENT,
    COUNT,
    DOCUMENTS,
    LAYERS,
    NUM_AUX,
    TRUTH,
    SglangServer,
    Site,
    assert_states,
    aux,
    in_order,
    serve,
    verifier_directory,
)

TIMEOUT_S = 20.0
IMPATIENT_S = 1.0
"""Where a server is to be silent."""
QUICK = ServerSettings(in_flight=4, pause_s=0.01, poll_s=0.05, patience_s=20.0)
AUX, LAST = ServerForm.sglang_aux, ServerForm.sglang_last
PASSING = [
    "500",
    "503",
    "silence",
    "slow",
    "short",
    "ragged",
    "not a number",
    "null",
    "missing",
    "other tokens",
    "reset",
    "half a reply",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return verifier_directory(tmp_path_factory.mktemp("sglang") / "tiny")


@pytest.fixture(scope="module")
def verifier(directory: Path) -> VerifierDescription:
    return describe_verifier(directory)


def source(
    site: Site, verifier: VerifierDescription, form: ServerForm, **more: Any
) -> SglangSource:
    return SglangSource(site.url, verifier, form, **{"timeout_s": TIMEOUT_S, **more})


def collect(source: SglangSource) -> list[Outcome]:
    return in_order(capture_documents(source, DOCUMENTS, QUICK, lambda _: None))


def check_all(outcomes: list[Outcome], form: ServerForm) -> None:
    for place, outcome in enumerate(outcomes):
        assert outcome.states is not None, outcome.error
        assert_states(outcome.states.aux, aux(place) if form is AUX else None)
        assert_states(outcome.states.last, None if form is AUX else TRUTH[f"{place}.post_norm"])


@pytest.mark.parametrize(
    "rule", CONTENT["sglang"]["rules"], ids=lambda r: f"{r['verifier']}_{r['asked']}"
)
def test_layer_ids_mean_what_the_engines_own_class_makes_of_them(rule: dict[str, Any]) -> None:
    layers = CONTENT["sglang"]["num_layers"]
    version = CONTENT["sglang"]["version"]
    expected = tuple(rule["entering"])
    if expected[-1] > layers:
        with pytest.raises(VerifierError, match="expected 0 to"):
            entering_ids(rule["verifier"], rule["asked"], layers, version)
    else:
        assert entering_ids(rule["verifier"], rule["asked"], layers, version) == expected


def test_an_unknown_class_needs_its_convention_said() -> None:
    with pytest.raises(VerifierError, match=r"NewForCausalLM by ids \[4, 9\].*give the convention"):
        entering_ids("NewForCausalLM", [4, 9], 32, "0.5.23")
    after, entering = LayerIdConvention.after, LayerIdConvention.entering
    assert entering_ids("NewForCausalLM", [4, 9], 32, "0.5.23", after) == (5, 10)
    assert entering_ids("NewForCausalLM", [9, 4], 32, "0.5.23", entering) == (4, 9)
    with pytest.raises(VerifierError, match=r"expected 0\.5\.14 or later"):
        entering_ids("DeepseekV3ForCausalLM", [4, 9], 32, "0.5.12")


def test_classes_with_states_of_their_own_are_those_of_the_wheel() -> None:
    assert set(CONTENT["sglang"]["before_norm_classes"]) == BEFORE_NORM_CLASSES


def test_the_options_that_are_read_exist_in_the_wheel() -> None:
    assert set(SglangServer("aux").args) <= set(CONTENT["sglang"]["server_fields"])


@pytest.mark.parametrize("form", [AUX, LAST], ids=str)
def test_states_are_the_engines_to_the_last_bit(
    form: ServerForm, verifier: VerifierDescription
) -> None:
    server = SglangServer(form.removeprefix("sglang_"))
    with serve(server) as site:
        check_all(collect(source(site, verifier, form)), form)
    assert all(sent["return_hidden_states"] is True for sent in server.sent)
    keys = [sent["extra_key"] for sent in server.sent]
    assert len(set(keys)) == COUNT, "no prefix of another request is found in the cache"


def test_each_server_says_what_it_gives(verifier: VerifierDescription) -> None:
    with serve(SglangServer("aux", quantization="fp8")) as one, serve(SglangServer("last")) as two:
        aux_offer = source(one, verifier, AUX).offer()
        last_offer = source(two, verifier, LAST).offer()
    assert (aux_offer.aux_layer_ids, aux_offer.last_hidden) == (LAYERS, None)
    assert aux_offer.server_layer_ids == tuple(k - 1 for k in LAYERS)
    assert (last_offer.aux_layer_ids, last_offer.last_hidden) == ((), LastHidden.post_norm)
    record = aux_offer.record()
    assert record["layer_id_convention"] == "entering"
    assert (record["engine"], record["version"], record["quantization"]) == (
        "SGLang",
        CONTENT["sglang"]["version"],
        "fp8",
    )


def test_two_servers_make_a_verifier(directory: Path, verifier: VerifierDescription) -> None:
    with serve(SglangServer("aux")) as one, serve(SglangServer("last")) as two:
        pair = SglangPair(source(one, verifier, AUX), source(two, verifier, LAST))
        model = ServerVerifier(directory, pair, QUICK)
        assert model.offer.last_hidden is LastHidden.post_norm
        assert model.describe() == verifier
        wanted = [LAYERS[2], LAYERS[0]]
        found = model.capture(DOCUMENTS, wanted)
        for place, states in enumerate(found):
            assert torch.equal(states.aux[0], aux(place)[:, 2])
            assert torch.equal(states.aux[1], aux(place)[:, 0])
            assert torch.equal(states.last, TRUTH[f"{place}.post_norm"])
        with pytest.raises(VerifierError, match=r"entering layers \[2, 16, 29\], not \[5\]"):
            model.capture(DOCUMENTS, [2, 5])


def test_servers_of_different_models_are_no_pair(verifier: VerifierDescription) -> None:
    other = SglangServer("last", model_path="/models/other")
    with serve(SglangServer("aux")) as one, serve(other) as two:
        pair = SglangPair(source(one, verifier, AUX), source(two, verifier, LAST))
        with pytest.raises(VerifierError, match=r"has model '/models/tiny'.*'/models/other'"):
            pair.offer()


def test_half_of_a_pair_is_no_verifier(directory: Path, verifier: VerifierDescription) -> None:
    with (
        serve(SglangServer("aux")) as site,
        pytest.raises(VerifierError, match=r"gives no last state.*SglangPair"),
    ):
        ServerVerifier(directory, source(site, verifier, AUX), QUICK)


WRONG_STARTS: dict[str, tuple[str, dict[str, Any], ServerForm, str]] = {
    "chunks": ("aux", {"chunked_prefill_size": 8192}, AUX, "--chunked-prefill-size -1"),
    "no_states": (
        "last",
        {"return_hidden_states_mode": None, "enable_return_hidden_states": False},
        LAST,
        "returns no states.*--enable-return-hidden-states",
    ),
    "aux_for_last": ("aux", {}, LAST, "returns aux states instead of the last one"),
    "last_for_aux": ("last", {}, AUX, "--enable-return-aux-hidden-states"),
    "dflash": ("aux", {"aux_hidden_state_capture": "dflash"}, AUX, "family 'dflash'"),
    "float16": ("aux", {"dtype": "float16"}, AUX, "computes in float16, expected bfloat16"),
}


@pytest.mark.parametrize("name", WRONG_STARTS)
def test_a_server_started_otherwise_is_refused_with_the_option(
    name: str, verifier: VerifierDescription
) -> None:
    kind, args, form, said = WRONG_STARTS[name]
    with serve(SglangServer(kind, **args)) as site, pytest.raises(VerifierError, match=said):
        collect(source(site, verifier, form))


def test_a_class_that_replies_with_other_states_is_refused(verifier: VerifierDescription) -> None:
    server = SglangServer("last")
    server.architecture = "MiMoV2ForCausalLM"
    with serve(server) as site, pytest.raises(VerifierError, match="a state of its own"):
        source(site, verifier, LAST).offer()


@pytest.mark.parametrize("form", [AUX, LAST], ids=str)
@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_costs_a_try_and_no_document(
    fault: str, form: ServerForm, verifier: VerifierDescription
) -> None:
    server = SglangServer(form.removeprefix("sglang_"), lambda n: fault if n in (2, 6) else None)
    timeout_s = IMPATIENT_S if fault == "silence" else TIMEOUT_S
    with serve(server) as site:
        check_all(collect(source(site, verifier, form, timeout_s=timeout_s)), form)
    extra = 0 if fault == "slow" else 2
    assert len(server.sent) == COUNT + extra


def test_values_of_a_finer_type_are_noticed(verifier: VerifierDescription) -> None:
    server = SglangServer("aux", lambda n: "finer type" if n == 3 else None)
    with serve(server) as site, pytest.raises(VerifierError, match="values that bfloat16 cannot"):
        collect(source(site, verifier, AUX))


def test_widths_are_of_the_verifier(tmp_path: Path) -> None:
    wide = describe_verifier(verifier_directory(tmp_path / "wide", hidden_size=16))
    with (
        serve(SglangServer("aux")) as site,
        pytest.raises(VerifierError, match=rf"shape \[\d+, {NUM_AUX * 8}\], expected"),
    ):
        collect(source(site, wide, AUX))
