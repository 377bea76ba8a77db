"""Every damage is found, and named as closely as the format allows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3 import shards
from eagle3.data.layout import StateLayout
from eagle3.data.native_index import read_index
from eagle3.data.native_manifest import read_manifest
from eagle3.data.scan import CHUNK_BYTES, Fault, Part, is_finite, scan
from eagle3.data.torch_zip import TorchZip
from eagle3.errors import DataError
from eagle3.verify import VerifyReport, verify
from tests.converting import LAYOUT, LENGTHS, run, write_capture

SHARD = "shard-00001.safetensors"


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture and its native form, which no test changes."""
    root = tmp_path_factory.mktemp("verify")
    run(write_capture(root / "capture"), root / "native")
    return root


@pytest.fixture
def native(complete: Path, tmp_path: Path) -> Path:
    return shutil.copytree(complete / "native", tmp_path / "native")


@pytest.fixture
def capture(complete: Path, tmp_path: Path) -> Path:
    return shutil.copytree(complete / "capture", tmp_path / "capture")


def look(directory: Path, layout: StateLayout = LAYOUT, samples: int | None = None) -> VerifyReport:
    return verify(directory, layout, lambda line: None, num_samples=samples, num_workers=2)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x01
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["native", "capture"])
def test_whole_directories_pass(complete: Path, kind: str) -> None:
    report = look(complete / kind)
    assert report.damages == ()
    assert report.result.num_checked == report.result.num_samples == len(LENGTHS)
    states = sum(LENGTHS) * 4 * 4 * 2
    assert states < report.result.num_bytes < states + 60_000
    assert any("CRC-32" in check for check in report.result.checks)
    assert report.result.unchecked == ()


@pytest.mark.parametrize("tensor", range(4), ids=["aux_hidden", "last_hidden", "ids", "mask"])
@pytest.mark.parametrize("sample", [3, 4], ids=["first of the shard", "last of the shard"])
def test_a_flipped_byte_of_a_sample_is_named(native: Path, tensor: int, sample: int) -> None:
    manifest = read_manifest(native)
    index = read_index(native, manifest)
    assert index.shard[sample] == 1
    length = int(index.documents.lengths[sample])
    first, stop = manifest.shard_layout(1).ranges(int(index.start[sample]), length)[tensor]
    flip(native / SHARD, stop - 1)
    (damage,) = look(native).damages
    assert (damage.first_byte, damage.stop_byte) == (first, stop)
    assert damage.sample == f"{int(index.documents.sample_hash[sample]):016x}"
    assert damage.path.endswith(SHARD)
    assert "other bytes than its checksum says" in damage.what
    assert f"sample {damage.sample}, bytes {first:,} to {stop - 1:,}" in damage.line()


@pytest.mark.parametrize("place", [0, 3, 8, 100, 4095])
def test_a_flipped_byte_of_a_header_is_named(native: Path, place: int) -> None:
    flip(native / SHARD, place)
    (damage,) = look(native).damages
    assert (damage.first_byte, damage.stop_byte) == (0, 4096)
    assert "another header" in damage.what


@pytest.mark.parametrize("name", ["manifest.json", "index.npz"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_a_flipped_byte_of_manifest_or_index_is_named(
    native: Path, name: str, share: float
) -> None:
    path = native / name
    flip(path, int(share * path.stat().st_size))
    damages = look(native).damages
    assert any(name in damage.line() for damage in damages)


def test_shards_are_compared_without_an_index(native: Path) -> None:
    (native / "index.npz").unlink()
    flip(native / SHARD, 4100)
    index, shard = look(native).damages
    assert "index.npz: cannot be read" in index.what
    assert "blake2b" in shard.what
    assert shard.path.endswith(SHARD)


def test_cut_deleted_and_replaced_shards_are_named(native: Path) -> None:
    os.truncate(native / SHARD, 4096 + 300)
    (native / "shard-00002.safetensors").unlink()
    shutil.copy(native / "shard-00000.safetensors", native / "shard-00003.safetensors")
    found: dict[str, list[str]] = {}
    for damage in look(native).damages:
        found.setdefault(Path(damage.path).name, []).append(damage.what)
    assert found.keys() == {f"shard-{n:05d}.safetensors" for n in (1, 2, 3)}
    assert "found 4,396 bytes, expected" in found[SHARD][0]
    assert any("the file ends before it" in what for what in found[SHARD])
    assert "cannot be read" in found["shard-00002.safetensors"][0]


def test_an_unknown_version_and_an_index_of_another_directory(native: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run(write_capture(tmp_path / "small", (4, 5)), other)
    shutil.copy(other / "index.npz", native / "index.npz")
    assert "belongs to another directory" in look(native).damages[0].what
    path = native / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 99'))
    (damage,) = look(native).damages
    assert "found 99, expected 1" in damage.what


def test_every_record_of_a_capture_is_compared(capture: Path) -> None:
    with TorchZip(capture / "data_3.pt") as archive:
        entries = {name: archive.start(entry) for name, entry in archive.entries.items()}
        sizes = {name: entry.size for name, entry in archive.entries.items()}
    content = (capture / "data_3.pt").read_bytes()
    for name, start in entries.items():
        (capture / "data_3.pt").write_bytes(content)
        flip(capture / "data_3.pt", start + sizes[name] - 1)
        damages = look(capture).damages
        found = [damage for damage in damages if f"record {name}:" in damage.what]
        assert [(d.first_byte, d.stop_byte) for d in found] == [(start, start + sizes[name])]
        assert all(damage.path.endswith("data_3.pt") for damage in damages)


def test_files_of_a_capture_that_are_cut_or_gone(capture: Path) -> None:
    path = capture / "data_3.pt"
    path.write_bytes(path.read_bytes()[:-100])
    (capture / "data_4.pt").unlink()
    (capture / "data_4.pt").symlink_to(capture / "nowhere")
    damages = look(capture).damages
    assert [Path(damage.path).name for damage in damages] == [f"data_{n}.pt" for n in (3, 4)]
    assert "cut off" in damages[0].what
    assert "No such file" in damages[1].what


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission_denied_is_named(capture: Path, native: Path) -> None:
    (capture / "data_3.pt").chmod(0)
    (native / SHARD).chmod(0)
    for directory in (capture, native):
        assert any("Permission denied" in damage.what for damage in look(directory).damages)


def spoil(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change a document and save it with right checksums."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def test_wrong_contents_with_right_checksums_are_found(capture: Path) -> None:
    spoil(capture / "data_1.pt", lambda c: c["hidden_states"][3][2].fill_(float("inf")))
    spoil(capture / "data_2.pt", lambda c: c["input_ids"].fill_(50))
    spoil(capture / "data_6.pt", lambda c: c["hidden_states"][0][1, 2].fill_(float("nan")))
    spoil(
        capture / "data_8.pt",
        lambda c: c.update(hidden_states=[h.half() for h in c["hidden_states"]]),
    )
    damages = look(capture).damages
    assert [Path(damage.path).name for damage in damages] == [f"data_{n}.pt" for n in (1, 2, 6, 8)]
    assert "NaN or inf" in damages[0].what
    assert "found token ids 50..50" in damages[1].what
    assert "NaN or inf" in damages[2].what
    assert "found float16, expected bfloat16" in damages[3].what


def test_a_capture_without_checksums_says_so(capture: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        spoil(capture / "data_3.pt", lambda content: None)
    finally:
        torch.serialization.set_crc32_options(True)
    report = look(capture)
    assert report.damages == ()
    assert report.result.unchecked == ("bytes of 1 files, which have no checksums",)


def test_a_sample_looks_at_so_many_and_says_so(native: Path, capture: Path) -> None:
    for directory in (native, capture):
        report = look(directory, samples=3)
        assert (report.result.num_checked, report.result.num_samples) == (3, len(LENGTHS))
        assert "samples      3 of 10" in report.lines()
    assert any("only samples" in text for text in look(native, samples=3).result.unchecked)
    flip(native / SHARD, 4100)
    assert look(native, samples=9).damages
    assert not look(native, samples=0).damages


def test_shared_storages_are_read_once(tmp_path: Path) -> None:
    capture = write_capture(tmp_path / "capture", (6,))
    stacked = torch.randn(4, 6, 4).bfloat16()
    stacked[2, 3, 1] = float("nan")
    spoil(capture / "data_0.pt", lambda c: c.update(hidden_states=list(stacked)))
    (damage,) = look(capture).damages
    assert "NaN or inf" in damage.what


def test_what_is_no_capture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected"):
        look(tmp_path)


@pytest.mark.parametrize("kind", ["native", "capture"])
def test_command_line(
    native: Path, capture: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = {"native": native, "capture": capture}[kind]
    command = ["verify", str(directory), "--json", str(tmp_path / "found.json")]
    assert shards.main(command) == 0
    with TorchZip(capture / "data_3.pt") as archive:
        states = archive.start(archive.entries["data_3/data/2"])
    place = {"native": (SHARD, 4300), "capture": ("data_3.pt", states)}[kind]
    flip(directory / place[0], place[1])
    capsys.readouterr()
    assert shards.main(command) == 1
    assert "damages      1" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {
        "directory",
        "format",
        "ok",
        "samples",
        "samples_checked",
        "bytes",
        "seconds",
        "gb_per_s",
        "checks",
        "unchecked",
        "damages",
    }
    assert found["damages"][0].keys() == {"path", "what", "sample", "first_byte", "stop_byte"}


def test_scan_reads_through_chunk_borders(tmp_path: Path) -> None:
    """States that begin at an odd byte and span several reads."""
    states = torch.randn(CHUNK_BYTES // 4 + 5000)
    path = tmp_path / "states"
    path.write_bytes(b"odd" + states.numpy().tobytes() + b"end")
    size = 4 * len(states)
    part = Part(3, 3 + size, None, ((3, 3 + size),), torch.float32)
    assert scan(path, [part]) == [None]
    states[CHUNK_BYTES // 4] = float("nan")
    path.write_bytes(b"odd" + states.numpy().tobytes() + b"end")
    assert scan(path, [part]) == [Fault.not_finite]
    assert scan(path, [Part(3 + size, 6 + size, 0), Part(9 + size, 10 + size)]) == [
        Fault.checksum,
        Fault.cut,
    ]
    assert not is_finite(states)


def test_speculators_files_have_no_checksums(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    directory = tmp_path / "capture"
    directory.mkdir()
    ids, mask = [3, 4, 5, 6], [0, 0, 1, 1]
    table = arrow.table({"input_ids": [ids], "loss_mask": [mask], "seq_len": [4]})
    with (
        arrow.OSFile(str(directory / "data-00000-of-00001.arrow"), "wb") as file,
        arrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (directory / "state.json").write_text(json.dumps(state))
    states = torch.randn(4, 4, 4).bfloat16()
    path = directory / "hs_0.safetensors"
    save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
    report = look(directory)
    assert (report.format, report.damages) == ("speculators 0.9", ())
    assert report.result.unchecked == ("bytes of 1 files, which have no checksums",)
    states[1, 2, 3] = float("inf")
    save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
    (damage,) = look(directory).damages
    assert "states: NaN or inf" in damage.what


def test_flips_outside_the_records_of_a_capture_are_found(capture: Path) -> None:
    """In the header of a record, and in the last bytes of the file."""
    path = capture / "data_3.pt"
    whole = path.read_bytes()
    for place in (1, len(whole) - 4, len(whole) - 14):
        flip(path, place)
        (damage,) = look(capture).damages
        assert damage.line().startswith(f"{path}: found a torch.save file of"), place
        path.write_bytes(whole)
    assert "dates, versions" in look(capture).result.checks[0]


def test_checksums_that_differ_late_are_shown_whole(native: Path) -> None:
    path = native / "manifest.json"
    content = json.loads(path.read_text())
    stated = content["blake2b"]
    content["blake2b"] = stated[:-1] + ("1" if stated[-1] == "0" else "0")
    path.write_text(json.dumps(content))
    (damage,) = look(native).damages
    assert f"found content with the checksum {stated}, expected {content['blake2b']}" in damage.what
