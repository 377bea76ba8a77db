"""Servers that fail in every way: the pipeline ends complete, with the engines' own states."""

from __future__ import annotations

import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch

from eagle3.capturing.config import ServerConfig
from eagle3.capturing.engines import Engine
from eagle3.capturing.plan import plan_capture
from eagle3.data.native_manifest import read_manifest
from eagle3.errors import ConfigError, DataError
from eagle3.names import LastHidden, ServerForm, StatesDtype
from tests.capturing.worlds import content, run, samples, settings, write_lines
from tests.verifier.servers import (
    DOCUMENTS,
    LAYERS,
    Fault,
    SglangServer,
    VllmServer,
    aux,
    serve,
    verifier_directory,
)
from tests.verifier.specforge_server import CaptureServer, Objects

SGLANG = ["500", "503", "silence", "reset", "half a reply", "missing", "short", "not a number"]
PATCHED = ["500", "503", "silence", "reset", "half a reply", "missing", "short", "lost object"]
VLLM = ["500", "503", "silence", "reset", "half a reply", "missing", "cut file", "no file"]


PLACES = [place for place, ids in enumerate(DOCUMENTS) if len(ids) > 1]
LINES = [{"ids": DOCUMENTS[place].tolist(), "n": 1} for place in PLACES]


def storm(seed: int, faults: list[str]) -> Fault:
    """A fault for a third of the requests, and one restart."""
    draw = random.Random(seed)
    drawn = [draw.choice(faults) if draw.random() < 0.33 else None for _ in range(500)]
    return lambda number: "restart" if number == 5 else drawn[number % 500]


def quick(**changes: object) -> ServerConfig:
    known = {"in_flight": 3, "attempts": 40, "timeout_s": 0.5, "patience_s": 30.0}
    return ServerConfig(**{**known, **changes})  # type: ignore[arg-type]


def use_store(patch: pytest.MonkeyPatch, objects: Objects) -> None:
    """Mooncake's client, as far as it is used, connected to ``objects``."""
    methods = {"setup": lambda *_: 0, "get": objects.get, "remove": objects.remove}
    store = ModuleType("mooncake.store")
    vars(store)["MooncakeDistributedStore"] = type("MooncakeDistributedStore", (), methods)
    patch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    patch.setitem(sys.modules, "mooncake.store", store)


FORMS = [ServerForm.sglang_aux, ServerForm.sglang_spec_capture, ServerForm.vllm_connector]


@pytest.mark.parametrize("form", FORMS)
def test_a_storm_of_faults_ends_complete(
    form: ServerForm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = verifier_directory(tmp_path / "verifier")
    tokens = write_lines(tmp_path / "tokens.jsonl", LINES)
    shared = tmp_path / "shared"
    shared.mkdir()
    results = []
    for name, faulty in (("calm", False), ("stormy", True)):
        with ExitStack() as stack:
            if form is ServerForm.sglang_aux:
                one = SglangServer("aux", *([storm(1, SGLANG)] if faulty else []))
                two = SglangServer("last", *([storm(2, SGLANG)] if faulty else []))
                url, last_url = (stack.enter_context(serve(s)).url for s in (one, two))
                server = quick(url=url, last_url=last_url, form=form)
            elif form is ServerForm.sglang_spec_capture:
                patched = CaptureServer(*([storm(4, PATCHED)] if faulty else []))
                use_store(monkeypatch, patched.objects)
                server = quick(url=stack.enter_context(serve(patched)).url, form=form)
            else:
                only = VllmServer(shared, *([storm(3, VLLM)] if faulty else []))
                stack.callback(only.close)
                url = stack.enter_context(serve(only)).url
                server = quick(url=url, form=form, shared=str(shared), shared_as="/shared")
            wanted = settings(
                directory,
                tmp_path / name,
                tokens=str(tokens),
                aux_layer_ids=list(LAYERS),
                dtype=StatesDtype.bfloat16,
                server=server,
            )
            found, _ = run(wanted)
        assert found.documents == len(PLACES)
        results.append(content(tmp_path / name))
    assert results[0] == results[1]
    for place, sample in zip(PLACES, samples(tmp_path / "stormy"), strict=True):
        assert torch.equal(sample.input_ids, DOCUMENTS[place])
        assert torch.equal(sample.aux_hidden, aux(place).flatten(1))
    post_norm = form is not ServerForm.vllm_connector
    manifest = read_manifest(tmp_path / "stormy")
    kind = LastHidden.post_norm if post_norm else LastHidden.pre_norm
    assert manifest.states.last_hidden is kind
    record = json.loads((tmp_path / "stormy" / "capture.json").read_text())
    assert record["states"]["engine"] == ("SGLang" if post_norm else "vLLM")
    assert record["states"]["last_hidden"] == str(kind)


def test_documents_that_never_succeed_are_left_out_or_stop_it(tmp_path: Path) -> None:
    directory = verifier_directory(tmp_path / "verifier")
    tokens = write_lines(tmp_path / "tokens.jsonl", LINES)
    broken = tuple(LINES[1]["ids"])

    class Choosy(SglangServer):
        def states(self, content: dict[str, object], place: int, fault: str | None) -> object:
            bad = tuple(self.ids(content)) == broken
            return super().states(content, place, "short" if bad else fault)

    with serve(Choosy("aux")) as one, serve(SglangServer("last")) as two:
        server = quick(url=one.url, last_url=two.url, form=ServerForm.sglang_aux, attempts=2)
        wanted = {
            "tokens": str(tokens),
            "aux_layer_ids": list(LAYERS),
            "dtype": StatesDtype.bfloat16,
            "server": server,
        }
        with pytest.raises(DataError, match="max_failed allows 0"):
            run(settings(directory, tmp_path / "strict", **wanted))
        found, _ = run(settings(directory, tmp_path / "out", max_failed=1, **wanted))
    assert found.documents == len(PLACES) - 1
    assert "line 2" in found.failed[0]
    kept = [line["ids"] for number, line in enumerate(LINES) if number != 1]
    assert [s.input_ids.tolist() for s in samples(tmp_path / "out")] == kept


def test_a_server_writes_no_answers(tmp_path: Path) -> None:
    directory = verifier_directory(tmp_path / "verifier")
    tokens = write_lines(tmp_path / "tokens.jsonl", LINES)
    wanted = {"tokens": str(tokens), "aux_layer_ids": list(LAYERS), "dtype": StatesDtype.bfloat16}
    with serve(SglangServer("aux")) as one, serve(SglangServer("last")) as two:
        server = quick(url=one.url, last_url=two.url, form=ServerForm.sglang_aux)
        plan = plan_capture(settings(directory, tmp_path / "o", server=server, **wanted))
        with pytest.raises(ConfigError, match="by a model in this process only"):
            Engine(plan).generator()
    nameless = settings(directory, tmp_path / "o", server=ServerConfig(url="http://x"), **wanted)
    with pytest.raises(ConfigError, match=r"server\.url is set without server\.form"):
        plan_capture(nameless)
