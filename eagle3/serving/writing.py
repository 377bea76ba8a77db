"""A directory that is there as a whole and proven, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import save

from eagle3.errors import ConfigError, DataError
from eagle3.names import ExportEmbeddings
from eagle3.serving.card import write_text_files
from eagle3.serving.config import ExportConfig
from eagle3.serving.embedding import embedding_rows
from eagle3.serving.layout import EMBEDDING
from eagle3.serving.plan import ExportPlan
from eagle3.serving.proof import Check, prove
from eagle3.serving.source import ExportSource


def write_proven(
    out: Path, source: ExportSource, plan: ExportPlan, settings: ExportConfig
) -> list[Check]:
    """Write beside ``out``, prove what was written, and rename it; returns the checks.

    Raises:
        ConfigError: ``out`` is there already or cannot be made; the embedding is not at hand.
        DataError: a check does not hold; nothing stays then.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out}: found files there, expected a new directory, so that no old file is served "
            "with new ones: give another out=DIR, or remove it"
        )
    partial = out.with_name(f".{out.name}.partial")
    # left by a process that was killed; whoever still wrote it would fail at the rename
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_files(partial, source, plan, settings)
        checks = prove(partial, source, plan)
        broken = [f"{check.name}: {check.found}" for check in checks if not check.holds]
        if broken:
            raise DataError(
                "\n       ".join(
                    ["the export does not hold what was trained, so it was removed:", *broken]
                )
            )
        write_text_files(partial, source, plan, settings, checks)
        if out.exists():
            out.rmdir()
        partial.replace(out)
    except PermissionError as error:
        raise ConfigError(
            f"cannot write {error.filename} ({error.strerror}): give out=/a/writable/directory"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return checks


def _write_files(
    directory: Path, source: ExportSource, plan: ExportPlan, settings: ExportConfig
) -> None:
    tensors = dict(plan.tensors)
    if settings.embeddings is ExportEmbeddings.verifier:
        if source.verifier_directory is None:
            raise ConfigError(
                "embeddings=verifier: found no verifier, expected paths.verifier=DIR with its "
                "*.safetensors; or leave the embedding to the engine with embeddings=omit"
            )
        shape = (source.config.model.vocab_size, source.config.model.hidden_size)
        tensors[EMBEDDING] = embedding_rows(source.verifier_directory, None, shape)
    # the library's own writer makes a file that only its owner can read
    with (directory / "model.safetensors").open("wb") as file:
        file.write(save(tensors, {"format": "pt"}))
        file.flush()
        os.fsync(file.fileno())
    text = json.dumps(plan.config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
