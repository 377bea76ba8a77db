"""The same documents give the same audit in every format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.convert import ConvertRequest, convert
from eagle3.data.declaration import Declaration
from eagle3.data.layout import StateLayout
from eagle3.inspection.facts import Audit
from eagle3.inspection.stated import GivenFacts
from eagle3.names import LastHidden, LayerIdConvention
from tests.inspection.conftest import Look
from tests.inspection.planted import AUX_IDS, HIDDEN, VOCAB, capture


def facts(audit: Audit) -> tuple[object, ...]:
    """What does not depend on the names of files and directories."""
    contents = audit.contents
    return (
        audit.directory.fingerprint,
        audit.directory.aux_layer_ids,
        audit.directory.last_hidden,
        audit.directory.bytes_per_token,
        contents.lengths,
        contents.validation,
        contents.duplicates,
        contents.supervision.share_histogram,
        audit.packing,
        audit.reading,
        audit.states,
        audit.agreement,
        [finding for finding in audit.findings if finding.topic != "files"],
    )


def test_native(look: Look, shards: Path, tmp_path: Path) -> None:
    native = tmp_path / "native"
    request = ConvertRequest(
        source=shards,
        out=native,
        layout=StateLayout(len(AUX_IDS), HIDDEN, VOCAB),
        declaration=Declaration(),
        cache=tmp_path / "cache",
        shard_bytes=20_000,
        num_workers=2,
    )
    convert(request, lambda line: None)
    audit = look(native)
    assert facts(audit) == facts(look(shards))
    assert audit.directory.format == "native"
    assert 1 < audit.directory.files < 12
    assert set(audit.directory.said_by.values()) == {"manifest.json"}


def test_speculators(look: Look, shards: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="comes with the extra 'speculators'")
    from tests.data.speculators_files import write_capture

    documents = capture()
    for document in documents:
        document["hidden_states"] = [s.to(torch.bfloat16) for s in document["hidden_states"]]
    directory = write_capture(tmp_path / "prepared", documents)
    given = GivenFacts(tuple(AUX_IDS), LayerIdConvention.entering, LastHidden.pre_norm)
    audit = look(directory, given=given)
    assert facts(audit) == facts(look(shards))
    assert audit.directory.format == "speculators 0.9"
    assert audit.directory.said_by["hidden_size"] == "verifier's config.json"
    assert look(directory, given=given, verifier=None).directory.said_by == {
        "num_aux_layers": "command line",
        "hidden_size": "hs_0.safetensors",
        "aux_layer_ids": "command line",
        "layer_id_convention": "command line",
        "last_hidden": "command line",
    }
