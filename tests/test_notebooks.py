"""Every notebook runs, keeps no output, and holds no logic of its own."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, object]]:
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = code_cells(path)
    source = "\n".join("".join(cell["source"]) for cell in cells)  # type: ignore[call-overload]
    assert all(cell["outputs"] == [] for cell in cells)
    definitions = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    assert not any(isinstance(node, definitions) for node in ast.walk(ast.parse(source)))
    exec(compile(source, path.name, "exec"), {})
    assert capsys.readouterr().out
