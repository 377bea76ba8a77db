"""A whole run with every technique on and with every technique off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_run import curve, make_world, some_documents

RUN = ("max_seq_len=48", "epochs=4", "ttt_steps=5", "noise_std=0.1", "trainer.max_steps=50")


def test_curves_of_all_on_and_all_off_agree(tmp_path: Path) -> None:
    """Fifty optimizer steps with noise, packs of several documents, a sliding window."""
    world = make_world(tmp_path, some_documents(60))
    for compute in ("fast", "reference"):
        world.run(*RUN, "model.sliding_window=9", f"compute={compute}")
    fast, reference = world.run_folders()
    for name in ("train/loss", "train/loss_step/4", "optim/grad_norm", "val/loss"):
        expected = curve(reference, name)
        assert curve(fast, name) == pytest.approx(expected, rel=1e-4), name
    assert len(curve(fast, "train/loss")) == 50
    assert curve(fast, "train/loss")[-1] < 0.9 * curve(fast, "train/loss")[0]
    for name in ("val/acceptance_replay", "val/accuracy", "val/accept_rate/2"):
        assert curve(fast, name) == pytest.approx(curve(reference, name), rel=1e-4), name
