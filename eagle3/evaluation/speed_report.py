"""What the acceptance found here would be worth on a server with other costs."""

from __future__ import annotations

from eagle3.decoding.costs import Costs
from eagle3.decoding.speed import best, lengths_of, speed_table
from eagle3.errors import ConfigError
from eagle3.evaluation.config import SpeedConfig
from eagle3.evaluation.report import Report

_DEFAULT_DRAFTS = 7


def add_prediction(report: Report, speed: SpeedConfig) -> None:
    """A table for a server of ``speed.baseline_tok_s``; nothing without it.

    Raises:
        ConfigError: no acceptance is known, or figures that cannot be.
    """
    if speed.baseline_tok_s is None:
        return
    if speed.baseline_tok_s <= 0 or speed.drafter_ms < 0:
        raise ConfigError(
            f"speed.baseline_tok_s={speed.baseline_tok_s}, speed.drafter_ms={speed.drafter_ms}: "
            "expected tokens per second above 0 and milliseconds of 0 or more"
        )
    lengths = lengths_of(speed.acceptance) if speed.acceptance else report.lengths
    if not lengths:
        raise ConfigError(
            "speed.baseline_tok_s is set and no acceptance is known: give speed.acceptance=[..], "
            "the share of rounds that accept draft 1, 2, ..., or ckpt=, head= or server="
        )
    single = 1.0 / speed.baseline_tok_s
    relative = speed.verifier_cost or [1.0] * (_DEFAULT_DRAFTS + 1)
    if relative[0] != 1.0:
        raise ConfigError(
            f"speed.verifier_cost: found {relative[0]} for one token, expected 1 there, since all "
            "are multiples of the pass over one token"
        )
    drafter_s = speed.drafter_ms / 1e3
    costs = Costs(tuple(single * cost for cost in relative), drafter_s, drafter_s)
    rows = speed_table(lengths, costs)
    if not rows:
        raise ConfigError(
            "speed.verifier_cost: found the cost of one token only, expected that of two or more"
        )
    name = f"server at {speed.baseline_tok_s:g} tok/s"
    report.tables[f"Predicted for a {name}"] = [
        {
            "drafts": str(row.draft_tokens),
            "acceptance length": f"{row.acceptance_length:.3f}",
            "tok/s of one user": f"{row.tokens_per_s:.1f}",
            "speedup": f"{row.speedup:.2f}",
            "breaks even at": f"{row.break_even:.2f}",
        }
        for row in rows
    ]
    report.curves[f"predicted, {name}"] = {row.draft_tokens: row.speedup for row in rows}
    fastest = best(rows)
    report.figures["predicted/draft_tokens"] = float(fastest.draft_tokens)
    report.figures["predicted/tokens_per_s"] = fastest.tokens_per_s
    report.figures["predicted/speedup"] = fastest.speedup
    if not speed.verifier_cost:
        report.notes.append(
            "the prediction takes a verifier pass over several tokens to cost what one over a "
            "single token costs, and a draft "
            f"{speed.drafter_ms:g} ms: the best a server can do. Measured figures are "
            "speed.verifier_cost=[1,..] and speed.drafter_ms"
        )
