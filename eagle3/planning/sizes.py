"""What is planned: the rows of one pack, and a drafter's training step over it.

A document is planned as a masked prompt, then its answer::

    row            0   1   2   3   4   5        6 rows, 3 of them prompt
    gate           0   0   0   1   1   1        G = 3
    step 0 reads               x   x   x        R_0 = 3
    step 1 reads           x   x   x            R_1 = 3   row i against the gate of row i + 1
    computed               x   x   x   x        A = 4
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from eagle3.config import ComputeConfig, Config, ModelConfig
from eagle3.names import Accelerator, ComputedRows, NormPreset, Precision

_FLOAT32, _BFLOAT16 = 4, 2


@dataclass(frozen=True)
class PlannedDocument:
    """Rows of a document in a pack, of which the first ``prompt_rows`` gate no loss."""

    rows: int
    prompt_rows: int

    def judged(self, ttt_step: int) -> int:
        """R_s, rows whose loss this step reads."""
        answer = self.rows - self.prompt_rows
        return max(min(answer, self.rows - ttt_step), 0)

    def first_read(self, ttt_steps: int) -> int:
        """First row that some step judges; all after it are judged too. ``rows``: none is."""
        if self.prompt_rows >= self.rows:
            return self.rows
        return max(self.prompt_rows - (ttt_steps - 1), 0)


@dataclass(frozen=True)
class PackRows:
    """Documents laid end to end in one pack, without padding."""

    documents: tuple[PlannedDocument, ...]

    @classmethod
    def typical(cls, rows: int, document_rows: int, supervised_share: float) -> PackRows:
        """Documents of ``document_rows`` rows, and one shorter one that fills the pack.

        Args:
            supervised_share: of the rows of each document, those that gate a loss; 0 to 1.

        Raises:
            ValueError: a share outside 0 to 1.
        """
        if not 0 <= supervised_share <= 1:
            raise ValueError(
                f"supervised_share: found {supervised_share}, expected a share from 0 to 1: "
                "give supervised rows over all rows"
            )
        whole, rest = divmod(rows, document_rows)
        sizes = [document_rows] * whole + [rest] * (rest > 0)
        return cls(
            tuple(PlannedDocument(size, size - round(size * supervised_share)) for size in sizes)
        )

    @cached_property
    def rows(self) -> int:
        """L"""
        return sum(document.rows for document in self.documents)

    @cached_property
    def gated(self) -> int:
        """G"""
        return sum(document.rows - document.prompt_rows for document in self.documents)

    def judged(self, ttt_step: int) -> int:
        """R_s"""
        return sum(document.judged(ttt_step) for document in self.documents)

    def reached(self, ttt_steps: int) -> int:
        """Rows whose token a judged row reads at some step, past its document's end too."""
        reached, start, end = 0, 0, 0
        for document in self.documents:
            stop = start + document.rows
            first = max(start + document.first_read(ttt_steps), end)
            if document.first_read(ttt_steps) < document.rows:
                end = min(stop + ttt_steps - 1, self.rows)
                reached += max(end - first, 0)
            start = stop
        return reached

    def read(self, ttt_steps: int) -> int:
        """Rows that some step judges."""
        return sum(document.rows - document.first_read(ttt_steps) for document in self.documents)


@dataclass(frozen=True)
class Step:
    """Forward and backward of one pack on one device."""

    model: ModelConfig
    compute: ComputeConfig
    pack: PackRows
    ttt_steps: int
    accelerator: Accelerator = Accelerator.gpu
    """``auto``: a card."""
    precision: Precision = Precision.auto
    """``auto``: bfloat16 autocast on a card, float32 on CPU."""
    full_verifier_head: bool = False
    """Covered rows are found with the verifier's whole head."""

    @classmethod
    def of_config(cls, config: Config, pack: PackRows) -> Step:
        """The step of a run that trains on such packs."""
        return cls(
            model=config.model,
            compute=config.compute,
            pack=pack,
            ttt_steps=config.ttt_steps,
            accelerator=config.trainer.accelerator,
            precision=config.trainer.precision,
            full_verifier_head=config.val.full_verifier_head,
        )

    @property
    def on_cpu(self) -> bool:
        return self.accelerator is Accelerator.cpu

    @property
    def mixed(self) -> bool:
        """Products in bfloat16, sums and weights in float32."""
        if self.precision is Precision.auto:
            return not self.on_cpu
        return self.precision is Precision.bf16_mixed

    @property
    def product_bytes(self) -> int:
        """Of a value that a product reads or makes."""
        return _BFLOAT16 if self.mixed else _FLOAT32

    @property
    def rows(self) -> int:
        """L"""
        return self.pack.rows

    @cached_property
    def computed(self) -> int:
        """A"""
        if self.compute.rows is ComputedRows.all:
            return self.rows
        return self.pack.read(self.ttt_steps)

    @cached_property
    def reached(self) -> int:
        """Rows whose token some computed row reads, at any step."""
        if self.compute.rows is ComputedRows.all:
            return self.rows
        return self.pack.reached(self.ttt_steps)

    @cached_property
    def judged(self) -> tuple[int, ...]:
        """R_s of each step."""
        return tuple(self.pack.judged(step) for step in range(self.ttt_steps))

    @property
    def verifier_rows(self) -> int:
        """Rows whose verifier logits are made."""
        return self.rows if self.compute.rows is ComputedRows.all else self.pack.gated

    def keyed(self, ttt_step: int) -> int:
        """Rows that get a key and a value: all at step 0, the computed ones later."""
        return self.rows if ttt_step == 0 else self.computed


@dataclass(frozen=True)
class Parameters:
    """Counts of a drafter's parameters by part, and of the frozen values beside it."""

    model: ModelConfig

    @property
    def query_width(self) -> int:
        """Hq * D"""
        return self.model.num_attention_heads * self.model.head_dim

    @property
    def key_width(self) -> int:
        """Hkv * D"""
        return self.model.num_key_value_heads * self.model.head_dim

    @property
    def fc(self) -> int:
        return self.model.num_aux_layers * self.model.hidden_size**2

    @property
    def query(self) -> int:
        """The largest of the three projections of ``cat(embedding, hidden)``."""
        return 2 * self.model.hidden_size * self.query_width

    @property
    def query_key_value(self) -> int:
        return self.query + 4 * self.model.hidden_size * self.key_width

    @property
    def output(self) -> int:
        """``o_proj``"""
        return self.model.hidden_size * self.query_width

    @property
    def mlp(self) -> int:
        return 3 * self.model.hidden_size * self.model.intermediate_size

    @property
    def body(self) -> int:
        """All matrices but ``lm_head``."""
        return self.fc + self.query_key_value + self.output + self.mlp

    @property
    def lm_head(self) -> int:
        return self.model.draft_vocab_size * self.model.hidden_size

    @property
    def norms(self) -> int:
        """Four gains of the layer and the final norm, and those of the norm layout."""
        size, width = self.model.hidden_size, self.model.num_aux_layers
        extra = 0 if self.model.norm_layout is NormPreset.portable else width * size
        per_head = 2 * self.model.head_dim if self.model.arch == "qwen3" else 0
        return 4 * size + extra + per_head

    @property
    def trained(self) -> int:
        head = self.lm_head if self.model.lm_head_trainable else 0
        return self.body + self.norms + head
