"""The shape of the code base: who may import whom, and how long things may get."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from eagle3.config import Config

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "eagle3"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [
    path for folder in ("eagle3", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
]
BOTTOM = {"eagle3.names", "eagle3.errors", "eagle3.dims", "eagle3.locking"}
FRAMEWORKS = {"lightning", "hydra", "wandb", "omegaconf"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def forbidden(path: Path) -> set[str]:
    """What this module may not import."""
    name = module_name(path)
    own = {n for n in imports(path) if n.startswith("eagle3.")}
    other = {n for n in imports(path) if within(n, FRAMEWORKS)}
    if name in BOTTOM:
        return {n for n in own if not within(n, BOTTOM)} | other
    if within(name, {"eagle3.ops"}):
        return {n for n in own if not within(n, BOTTOM | {"eagle3.ops"})} | other
    if within(name, {"eagle3.data"}):
        allowed_frameworks = {"lightning"} if name == "eagle3.data.datamodule" else set()
        return {n for n in own if not within(n, BOTTOM | {"eagle3.data"})} | {
            n for n in other if not within(n, allowed_frameworks)
        }
    if within(name, {"eagle3.model"}):
        below = BOTTOM | {"eagle3.ops", "eagle3.data", "eagle3.model", "eagle3.config"}
        return {n for n in own if not within(n, below)} | other
    return set()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_follow_the_direction_of_the_data(path: Path) -> None:
    assert not forbidden(path)


def test_only_the_composition_knows_hydra() -> None:
    users = {
        module_name(path) for path in MODULES if any(within(n, {"hydra"}) for n in imports(path))
    }
    assert users == {"eagle3.compose"}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in functions(path)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }
    assert not long


def test_the_cycle_free_order_holds() -> None:
    """Modules import each other without a cycle at import time."""
    graph = {
        module_name(path): {
            name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ImportFrom) and node.module is not None
            for name in [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        }
        for path in MODULES
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name in done:
            return
        for other in graph[name] & graph.keys():
            if not name.startswith(other + ".") and other != name:
                visit(other, (*above, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_no_file_name_breaks_an_override() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.splitlines() or [str(path) for path in SOURCES]
    assert not [name for name in names if "=" in name]


def test_every_option_is_read_somewhere() -> None:
    """An option that nothing reads would be accepted and do nothing."""
    read = {
        node.attr
        for path in MODULES
        if module_name(path) not in {"eagle3.config", "eagle3.checks"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    recorded = {"max_position_embeddings"}  # goes into the checkpoint, for servers
    assert {f.name for f in leaf_fields(Config)} - read - recorded == set()


def leaf_fields(schema: type) -> Iterator[dataclasses.Field[object]]:
    types = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(types[field.name]):
            yield from leaf_fields(types[field.name])
        else:
            yield field
