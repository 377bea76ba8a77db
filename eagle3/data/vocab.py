"""The draft vocabulary: which verifier tokens the drafter can propose.

``d2t`` holds offsets, not ids: ``verifier id = draft id + d2t[draft id]``. Draft ids ascend with
verifier ids, so a map is fully given by the set of selected verifier ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class VocabMap:
    """V draft tokens out of W verifier tokens."""

    d2t: Int[Tensor, " V"]
    """int64, offset from draft id to verifier id."""
    t2d: Bool[Tensor, " W"]
    """bool, true on selected verifier ids."""

    @property
    def draft_size(self) -> int:
        """V"""
        return self.d2t.shape[0]

    @property
    def verifier_size(self) -> int:
        """W"""
        return self.t2d.shape[0]

    @property
    def selected(self) -> Int[Tensor, " V"]:
        """int64, verifier id of each draft id, ascending."""
        return self.d2t + torch.arange(self.draft_size)

    def to_verifier(self, draft_ids: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """Draft ids to verifier ids."""
        return draft_ids + self.d2t[draft_ids]

    def covers(self, verifier_ids: Int[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
        """Which ids are in the draft vocabulary; a negative id (no token) is not."""
        return self.t2d[verifier_ids.clamp(min=0)] & (verifier_ids >= 0)

    @classmethod
    def identity(cls, size: int) -> VocabMap:
        """All tokens."""
        return cls(torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.bool))

    @classmethod
    def from_selected(cls, ids: Iterable[int] | Tensor, verifier_size: int) -> VocabMap:
        """Select these verifier ids, in any order.

        Raises:
            ConfigError: an id is repeated or outside the verifier's vocabulary.
        """
        selected = torch.as_tensor(
            ids if isinstance(ids, Tensor) else list(ids), dtype=torch.int64
        ).sort()[0]
        _check_range(selected, verifier_size)
        if len(selected.unique()) != len(selected):
            raise ConfigError("draft vocabulary: found repeated ids, expected each one once.")
        t2d = torch.zeros(verifier_size, dtype=torch.bool)
        t2d[selected] = True
        return cls(selected - torch.arange(len(selected)), t2d)

    @classmethod
    def from_frequencies(
        cls,
        counts: Mapping[int, int] | Tensor,
        draft_size: int,
        verifier_size: int,
        always_keep: Iterable[int] = (),
    ) -> VocabMap:
        """The most frequent tokens; of equally frequent ones, unseen included, the lowest ids.

        Args:
            counts: by verifier id, a mapping or a tensor [W].
            draft_size: V; as large as ``verifier_size`` or larger gives :meth:`identity`.
            verifier_size: W.
            always_keep: verifier ids selected whatever their count, such as turn ends.

        Raises:
            ConfigError: an id is outside the verifier's vocabulary, or ``always_keep`` is larger
                than the draft vocabulary.
        """
        if draft_size >= verifier_size:
            return cls.identity(verifier_size)
        frequency = _frequencies(counts, verifier_size)
        keep = torch.tensor(sorted(set(always_keep)), dtype=torch.int64)
        _check_range(keep, verifier_size)
        if len(keep) > draft_size:
            raise ConfigError(
                f"draft vocabulary: found {len(keep)} ids to keep always, expected at most "
                f"model.draft_vocab_size={draft_size}. Keep fewer, or raise it."
            )
        frequency[keep] = torch.iinfo(torch.int64).max
        return cls.from_selected(
            frequency.argsort(descending=True, stable=True)[:draft_size], verifier_size
        )


def save_vocab_map(path: Path | str, vocab_map: VocabMap) -> None:
    """Write a safetensors file with ``d2t`` and ``t2d``."""
    tensors = {"d2t": vocab_map.d2t.contiguous(), "t2d": vocab_map.t2d.contiguous()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def load_vocab_map(path: Path | str, draft_size: int, verifier_size: int) -> VocabMap:
    """Read a map and check it against the configured sizes and against itself.

    ``path`` is a safetensors file, a ``.pt`` file with a dict, or a directory with one ``.npy`` or
    ``.pt`` file each; all have ``d2t`` and ``t2d``, in a directory also ``d2t-{V}`` and
    ``t2d-{V}``.

    Raises:
        DataError: the map cannot be read, has other sizes or dtypes, contradicts itself, or holds
            absolute ids instead of offsets.
    """
    path = Path(path)
    tensors = _read_directory(path, draft_size) if path.is_dir() else _read_file(path)
    for key in ("d2t", "t2d"):
        if not isinstance(tensors.get(key), Tensor):
            raise DataError(
                f"{path}: key '{key}': found {', '.join(sorted(tensors)) or 'nothing'}, expected "
                "tensors d2t and t2d. Set paths.vocab_map to a vocabulary map."
            )
    vocab_map = VocabMap(
        _integers(tensors["d2t"], f"{path}: key 'd2t'"), _mask(tensors["t2d"], f"{path}: key 't2d'")
    )
    _check_sizes(vocab_map, min(draft_size, verifier_size), verifier_size, path)
    _check_consistency(vocab_map, path)
    return vocab_map


def _frequencies(counts: Mapping[int, int] | Tensor, verifier_size: int) -> Tensor:
    """Counts by verifier id, int64 [W], as a new tensor."""
    if isinstance(counts, Tensor):
        if counts.shape != (verifier_size,):
            raise ConfigError(
                f"token counts: found shape {list(counts.shape)}, expected [{verifier_size}], the "
                "verifier's vocabulary."
            )
        return counts.to(torch.int64, copy=True)
    frequency = torch.zeros(verifier_size, dtype=torch.int64)
    ids = torch.tensor(list(counts), dtype=torch.int64)
    _check_range(ids, verifier_size)
    frequency[ids] = torch.tensor(list(counts.values()), dtype=torch.int64)
    return frequency


def _check_range(ids: Tensor, verifier_size: int) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= verifier_size):
        raise ConfigError(
            f"draft vocabulary: found token ids {int(ids.min())}..{int(ids.max())}, expected 0.."
            f"{verifier_size - 1} (model.vocab_size={verifier_size}). Use the verifier's own "
            "tokenizer and vocabulary size."
        )


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}), expected a vocabulary map. Set paths.vocab_map to "
            "a .safetensors or .pt file, or to a directory with d2t and t2d."
        ) from error
    except Exception as error:  # a damaged file may fail anywhere in the unpickler
        raise DataError(
            f"{path}: cannot be loaded as tensors only, expected a torch.save file of a dict with "
            "d2t and t2d. Build the vocabulary map again."
        ) from error
    return content if isinstance(content, dict) else {}


def _read_directory(path: Path, draft_size: int) -> dict[str, Tensor]:
    tensors = {}
    for key in ("d2t", "t2d"):
        names = [f"{stem}{end}" for stem in (key, f"{key}-{draft_size}") for end in (".npy", ".pt")]
        found = [path / name for name in names if (path / name).is_file()]
        if len(found) != 1:
            raise DataError(
                f"{path}: found {', '.join(p.name for p in found) or 'none'} of "
                f"{', '.join(names)}, expected exactly one. Set paths.vocab_map to a vocabulary "
                f"map of model.draft_vocab_size={draft_size}, or leave one file."
            )
        tensors[key] = _read_array(found[0])
    return tensors


def _read_array(path: Path) -> Tensor:
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # either reader may fail anywhere in a damaged file
        raise DataError(
            f"{path}: cannot be loaded as one array ({type(error).__name__}), expected a .npy or "
            "torch.save file. Build the vocabulary map again."
        ) from error


def _integers(d2t: Tensor, where: str) -> Tensor:
    if d2t.ndim != 1 or d2t.dtype not in (torch.int64, torch.int32):
        raise DataError(
            f"{where}: found {d2t.dtype} {list(d2t.shape)}, expected int64 offsets [V]. "
            "Build the vocabulary map again."
        )
    return d2t.long()


def _mask(t2d: Tensor, where: str) -> Tensor:
    if t2d.ndim != 1 or t2d.dtype != torch.bool:
        raise DataError(
            f"{where}: found {t2d.dtype} {list(t2d.shape)}, expected a bool mask [W]. "
            "Build the vocabulary map again."
        )
    return t2d


def _check_sizes(vocab_map: VocabMap, draft_size: int, verifier_size: int, path: Path) -> None:
    found = (vocab_map.draft_size, vocab_map.verifier_size)
    if found != (draft_size, verifier_size):
        raise DataError(
            f"{path}: keys 'd2t' and 't2d': found sizes {found[0]} and {found[1]}, expected "
            f"{draft_size} (model.draft_vocab_size) and {verifier_size} (model.vocab_size). It is "
            "the map of another drafter or verifier: set paths.vocab_map to the right one, or "
            "correct the sizes."
        )
    if int(vocab_map.t2d.sum()) != draft_size:
        raise DataError(
            f"{path}: key 't2d': found {int(vocab_map.t2d.sum())} selected tokens, expected "
            f"{draft_size}, the length of d2t. Build the vocabulary map again."
        )


def _check_consistency(vocab_map: VocabMap, path: Path) -> None:
    where = f"{path}: key 'd2t'"
    selected, masked = vocab_map.selected, vocab_map.t2d.nonzero().squeeze(1)
    if torch.equal(selected, masked):
        return
    if torch.equal(vocab_map.d2t, masked):
        raise DataError(
            f"{where}: found values equal to the ids that t2d selects: it looks absolute, expected "
            "offsets (verifier id = draft id + d2t[draft id]). Save d2t - arange(V) instead."
        )
    low, high = int(selected.min()), int(selected.max())
    if low < 0 or high >= vocab_map.verifier_size:
        raise DataError(
            f"{where}: found verifier ids {low}..{high}, expected 0.."
            f"{vocab_map.verifier_size - 1}. Build the vocabulary map again."
        )
    if not bool((selected.diff() > 0).all()):
        raise DataError(
            f"{where}: found verifier ids that do not ascend strictly, expected each draft id to "
            "map to a higher verifier id than the one before. Build the vocabulary map again."
        )
    first = int((selected != masked).nonzero()[0])
    raise DataError(
        f"{where}: found verifier id {int(selected[first])} for draft id {first}, expected "
        f"{int(masked[first])} as t2d selects. Build the vocabulary map again."
    )
