"""Every trouble is planted once and found under its name; a sound run passes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.compose import Job, compose_config
from eagle3.config import Config
from eagle3.data.vocab_files import MapOrigin
from eagle3.distributed import Ranks
from eagle3.errors import ConfigError
from eagle3.inputs import Inputs, load_inputs
from eagle3.inspection.facts import Severity
from eagle3.model.layers import rms_norm
from eagle3.names import Precision, Switch
from eagle3.preflight import main
from eagle3.preflighting.command import check_startup, preflight, startup_findings
from eagle3.preflighting.report import Report
from eagle3.provenance import Run
from tests.inspection.planted import CONFIG, EPS, VOCAB, Document, capture, head, save
from tests.preflight.conftest import Configure, vocab_map
from tests.tiny_run import clean_environment


def troubles(report: Report) -> dict[str, Severity]:
    return {f.topic: f.severity for f in report.findings if f.severity is not Severity.ok}


def reason(report: Report, topic: str) -> str:
    return next(f.reason for f in report.findings if f.topic == topic)


def test_a_sound_run_passes_with_everything_checked(configure: Configure) -> None:
    report = preflight(configure())
    assert troubles(report) == {}
    assert report.unchecked == []
    assert report.exit_code == 0
    assert "gradients reach all 13 trained tensors" in reason(report, "one step")
    assert {"norm", "finite states", "coverage", "reading", "disk"} <= {
        f.topic for f in report.findings
    }


def not_a_number(documents: list[Document]) -> None:
    for document in documents:
        document["hidden_states"][1][5, 3] = torch.nan


def post_norm(documents: list[Document]) -> None:
    gain, _ = head()
    for document in documents:
        document["hidden_states"][-1] = rms_norm(document["hidden_states"][-1], gain, EPS)


@pytest.mark.parametrize(
    ("plant", "topic"), [(not_a_number, "finite states"), (post_norm, "norm")], ids=["nan", "norm"]
)
def test_planted_states_stop(
    configure: Configure, tmp_path: Path, plant: Callable[[list[Document]], None], topic: str
) -> None:
    documents = capture()
    plant(documents)
    save(tmp_path / "shards", documents, CONFIG)
    report = preflight(configure())
    assert troubles(report)[topic] is Severity.stop
    assert report.exit_code == 2


def test_another_number_of_aux_layers_stops(configure: Configure) -> None:
    report = preflight(configure(model={"num_aux_layers": 2}))
    assert troubles(report)["shards"] is Severity.stop
    assert "data_0.pt" in reason(report, "shards")
    assert {one.topic for one in report.unchecked} >= {"one step", "steps"}


def test_a_verifier_of_another_size_stops(configure: Configure) -> None:
    report = preflight(configure(model={"hidden_size": 24}))
    assert "set model.hidden_size=16" in reason(report, "verifier")


@pytest.mark.parametrize(
    ("size", "origin", "said"),
    [
        (VOCAB + 8, None, "It is the map of another drafter or verifier"),
        (VOCAB, MapOrigin(tokenizer_fingerprint="0123", tokenizer_name="other"), "of other"),
    ],
    ids=["size", "tokenizer"],
)
def test_a_map_of_another_vocabulary_stops(
    configure: Configure, tmp_path: Path, size: int, origin: MapOrigin | None, said: str
) -> None:
    path = vocab_map(tmp_path / "other.safetensors", size, origin)
    report = preflight(configure(paths={"vocab_map": str(path)}))
    assert troubles(report)["vocabulary map"] is Severity.stop
    assert said in reason(report, "vocabulary map")


def test_documents_that_are_cut_warn_with_the_length_that_cuts_none(configure: Configure) -> None:
    report = preflight(configure(max_seq_len=32))
    found = next(f for f in report.findings if f.topic == "long documents")
    assert found.severity is Severity.warning
    assert found.action == "set max_seq_len=128 to split none, if it fits"
    lost = preflight(configure(max_seq_len=32, data={"long_documents": "truncate"}))
    assert "are not trained" in reason(lost, "long documents")


def test_findings_of_a_mixture_name_the_directory(configure: Configure, tmp_path: Path) -> None:
    documents = capture()
    not_a_number(documents)
    broken = save(tmp_path / "broken", documents, CONFIG)
    sound = save(tmp_path / "sound", capture(), CONFIG)
    mixture = [{"path": str(sound)}, {"path": str(broken)}]
    report = preflight(configure(paths={"shards": None}, data={"mixture": mixture}))
    stops = [f.reason for f in report.stops if f.topic == "finite states"]
    assert len(stops) == 1
    assert stops[0].startswith(f"{broken}: NaN or inf")


def test_a_capture_that_has_not_run_is_not_started(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    paths = [f"paths.cache={cache}", f"paths.output={tmp_path}"]
    report = preflight(compose_config(["experiment=smollm2_quickstart", *paths]))
    assert report.exit_code == 0
    assert {"shards", "verifier"} <= {one.topic for one in report.unchecked}
    assert not cache.exists()


def test_wrong_keys_and_paths_stop_before_anything_is_opened(
    configure: Configure, tmp_path: Path
) -> None:
    report = preflight(configure(lr=0.0, paths={"shards": str(tmp_path / "gone")}))
    assert set(troubles(report)) == {"configuration", "paths"}
    assert len(report.findings) == 2


def test_a_rehearsal_is_not_judged_in_place_of_the_run() -> None:
    with pytest.raises(ConfigError, match=r"rehearsal.place=cpu.*Leave .rehearsal out"):
        main(compose_config(["experiment=kimi_100k", "+rehearsal=cpu"]), Job())


def test_without_data_and_verifier_sizes_are_still_answered() -> None:
    report = preflight(compose_config(["experiment=kimi_100k"]))
    assert report.exit_code == 0
    assert report.facts["trainable_parameters"] == 1_190_948_864
    assert {"shards", "verifier", "steps", "one step"} <= {one.topic for one in report.unchecked}
    assert any("longest max_seq_len" in table[0] for table in report.tables)


def test_without_data_a_card_gives_memory_and_pace() -> None:
    report = preflight(compose_config(["experiment=kimi_100k", "card=h100"]))
    assert "longest max_seq_len" in reason(report, "memory")
    assert "assumed: 40% of 989 TFLOP/s" in reason(report, "time")


def test_the_command_prints_writes_and_exits_with_2(configure: Configure, tmp_path: Path) -> None:
    config, found = configure(), tmp_path / "found.json"
    overrides = [
        f"{group}.{key}={value}"
        for group in ("paths", "model")
        for key, value in vars(getattr(config, group)).items()
        if isinstance(value, int | str)
    ]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "eagle3.preflight", *overrides),
            *("max_seq_len=70", "data.split_context_tokens=4", "trainer.accelerator=cpu"),
            *("data.last_hidden=post_norm", f"preflight_json={found}"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=clean_environment(),
        timeout=300,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "STOP" in done.stdout
    assert done.stderr == ""
    written = json.loads(found.read_text())
    assert written["exit_code"] == 2
    assert [f for f in written["findings"] if f["severity"] == "stop"]


@pytest.fixture
def inputs(configure: Configure, tmp_path: Path) -> tuple[Config, Inputs]:
    """As training has loaded them."""
    config = configure()
    run = Run(tmp_path, "name", "id", "group", is_main=False)
    loaded = load_inputs(config, run, Ranks(), "cpu", Precision.float32, lambda line: None)
    return config, loaded


def test_training_says_one_line_when_all_is_well(
    inputs: tuple[Config, Inputs], tmp_path: Path
) -> None:
    said: list[str] = []
    check_startup(*inputs, tmp_path, said.append)
    assert said == ["preflight: 7 ok, 0 warnings, 0 stops, 0 not checked"]


def test_training_stops_with_a_frozen_layer_unless_it_is_told_not_to_look(
    inputs: tuple[Config, Inputs], tmp_path: Path
) -> None:
    config, loaded = inputs
    rows = [replace(row, trainable=False) for row in loaded.parameters]
    frozen, said = replace(loaded, parameters=rows), list[str]()
    with pytest.raises(ConfigError, match="preflight=off trains anyway"):
        check_startup(config, frozen, tmp_path, said.append)
    assert said[0].startswith("stop: parameters: found frozen, expected trained: fc.weight")
    quiet: list[str] = []
    check_startup(replace(config, preflight=Switch.off), frozen, tmp_path, quiet.append)
    assert quiet == []


def test_training_and_the_command_agree(inputs: tuple[Config, Inputs], tmp_path: Path) -> None:
    config, loaded = inputs
    alone, within = preflight(config).facts, startup_findings(config, loaded, tmp_path).facts
    same = ("total_steps", "warmup_steps", "memory_bytes", "checkpoint_bytes", "vocab_coverage")
    assert {key: alone[key] for key in same} == {key: within[key] for key in same}
