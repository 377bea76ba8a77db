"""Which states are stored: declared by the directory or the config, never guessed."""

import json
from pathlib import Path

import pytest

from eagle3.data.declaration import (
    Declaration,
    StoredDeclaration,
    convert_layer_ids,
    read_declaration,
    resolve_declaration,
)
from eagle3.errors import DataError
from eagle3.names import LastHidden, LayerIdConvention

ENTERING, AFTER = LayerIdConvention.entering, LayerIdConvention.after
PRE, POST = LastHidden.pre_norm, LastHidden.post_norm
HERE = Path("shards")


def write_config(directory: Path, **hidden_states: object) -> Path:
    content = {"version": "2.0", "hidden_states": hidden_states}
    (directory / "data_config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        pytest.param(AFTER, ENTERING, (3, 31, 59), id="after to entering"),
        pytest.param(ENTERING, AFTER, (1, 29, 57), id="entering to after"),
        pytest.param(ENTERING, ENTERING, (2, 30, 58), id="entering stays"),
        pytest.param(AFTER, AFTER, (2, 30, 58), id="after stays"),
    ],
)
def test_layer_ids_convert_both_ways(
    source: LayerIdConvention, target: LayerIdConvention, expected: tuple[int, ...]
) -> None:
    converted = convert_layer_ids((2, 30, 58), source, target)
    assert converted == expected
    assert convert_layer_ids(converted, target, source) == (2, 30, 58)


def test_directory_without_config_declares_nothing(tmp_path: Path) -> None:
    assert read_declaration(tmp_path, 3) == StoredDeclaration()


def test_own_capture_declares_everything(tmp_path: Path) -> None:
    write_config(
        tmp_path, layer_ids=[3, 16, 28], layer_id_convention="entering", last_hidden="pre_norm"
    )
    resolved = resolve_declaration(Declaration(), read_declaration(tmp_path, 3), 3, tmp_path)
    assert resolved.aux_layer_ids == (3, 16, 28)
    assert resolved.last_hidden is PRE
    assert set(resolved.declared_by.values()) == {"data_config.json"}


def test_interrupted_capture_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".capture.json").write_text("{}")
    with pytest.raises(DataError, match="goes on where it stopped"):
        read_declaration(tmp_path, 3)


def test_last_of_four_ids_belongs_to_the_last_state(tmp_path: Path) -> None:
    write_config(tmp_path, layer_ids=[2, 30, 58, 60])
    stored = read_declaration(tmp_path, 3)
    assert stored.declaration.aux_layer_ids == (2, 30, 58)
    resolved = resolve_declaration(Declaration(None, AFTER, PRE), stored, 3, tmp_path)
    assert resolved.aux_layer_ids == (3, 31, 59)
    assert resolved.declared_by == {
        "aux_layer_ids": "data_config.json",
        "layer_id_convention": "config",
        "last_hidden": "config",
    }


@pytest.mark.parametrize(
    ("config", "overrides", "silent"),
    [
        pytest.param(
            Declaration(),
            ["data.aux_layer_ids=[2,30,58]", "layer_id_convention=entering", "last_hidden=pre_n"],
            [],
            id="nothing declared",
        ),
        pytest.param(
            Declaration((2, 30, 58), AFTER),
            ["data.last_hidden=pre_norm"],
            ["data.aux_layer_ids=", "data.layer_id_convention="],
            id="only the norm is missing",
        ),
        pytest.param(
            Declaration((2, 30, 58), None, PRE),
            ["data.layer_id_convention=entering"],
            ["data.last_hidden="],
            id="only the convention is missing",
        ),
    ],
)
def test_undeclared_fact_names_its_override(
    config: Declaration, overrides: list[str], silent: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        resolve_declaration(config, StoredDeclaration(), 3, HERE)
    message = str(caught.value)
    assert all(override in message for override in overrides)
    assert not any(other in message for other in silent)
    assert "speculators v0.3" in message


def test_hint_names_the_writer_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "data_config.json").write_text(
        json.dumps(
            {"speculators_version": "0.3.0", "hidden_states": {"layer_ids": [2, 15, 27, 29]}}
        )
    )
    with pytest.raises(DataError, match=r"(?s)\[2,15,27\].*speculators 0\.3\.0, which wrote"):
        resolve_declaration(Declaration(), read_declaration(tmp_path, 3), 3, tmp_path)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        pytest.param(Declaration((3, 16, 28), ENTERING), "[2,15,27]", id="other layers"),
        pytest.param(Declaration(None, AFTER), "entering", id="other convention"),
        pytest.param(Declaration(None, None, POST), "pre_norm", id="other norm"),
    ],
)
def test_config_against_directory_shows_both(config: Declaration, found: str) -> None:
    stored = StoredDeclaration(Declaration((2, 15, 27), ENTERING, PRE))
    with pytest.raises(DataError, match="disagree") as caught:
        resolve_declaration(config, stored, 3, HERE)
    assert found in str(caught.value)
    assert "data." in str(caught.value)


def test_same_states_in_two_conventions_agree() -> None:
    stored = StoredDeclaration(Declaration((3, 16, 28), ENTERING, PRE))
    resolved = resolve_declaration(Declaration((2, 15, 27), AFTER), stored, 3, HERE)
    assert resolved.aux_layer_ids == (3, 16, 28)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        pytest.param([2, 3, 3], "distinct", id="duplicate"),
        pytest.param([15, 2, 27], "ascending", id="unsorted"),
        pytest.param([-1, 2, 3], "non-negative", id="negative"),
        pytest.param([2, 15], "3 or 4", id="too few"),
        pytest.param([2, 15, 27, 28, 29], "3 or 4", id="too many"),
        pytest.param("2,15,27", "list of integers", id="text"),
        pytest.param([2.0, 15, 27], "list of integers", id="not integers"),
    ],
)
def test_bad_ids_in_the_directory_are_refused(tmp_path: Path, ids: object, message: str) -> None:
    write_config(tmp_path, layer_ids=ids)
    with pytest.raises(DataError, match=message) as caught:
        read_declaration(tmp_path, 3)
    assert "data_config.json: key 'hidden_states.layer_ids'" in str(caught.value)


def test_config_names_exactly_the_aux_layers() -> None:
    with pytest.raises(DataError, match=r"data\.aux_layer_ids: found 4 ids"):
        resolve_declaration(Declaration((2, 30, 58, 60), AFTER, PRE), StoredDeclaration(), 3, HERE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{", "not valid JSON", id="cut off"),
        pytest.param("[]", "JSON object", id="a list"),
        pytest.param('{"hidden_states": 3}', "'hidden_states'", id="not a section"),
        pytest.param('{"format": {"data_format_version": 99}}', "99", id="unknown version"),
        pytest.param('{"hidden_states": {"last_hidden": "raw"}}', "pre_norm, post_norm", id="kind"),
    ],
)
def test_bad_config_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "data_config.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_declaration(tmp_path, 3)
