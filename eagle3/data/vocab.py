"""The draft vocabulary: which verifier tokens the drafter can propose.

``d2t`` holds offsets, not ids: ``verifier id = draft id + d2t[draft id]``. Draft ids ascend with
verifier ids, so a map is fully given by the set of selected verifier ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from eagle3.errors import ConfigError


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
