"""Prompts, conversations or token ids to hidden states: ``python -m eagle3.capture``.

``verifier=DIR prompts=FILE out=DIR`` renders, lets the verifier write what is missing, captures and
records; the same command goes on after a crash. ``mode=forecast|merge|verify``: see
:class:`eagle3.names.CaptureMode`.
"""

from __future__ import annotations

import sys

from eagle3.capture_progress import print_line
from eagle3.capturing.config import CaptureRunConfig
from eagle3.compose import Command, Job, entry_point
from eagle3.names import CaptureMode

CAPTURE = Command("capture", CaptureRunConfig)


def run(settings: CaptureRunConfig, job: Job) -> None:
    """What ``settings.mode`` says."""
    from eagle3.capturing.plan import plan_capture  # seconds of imports

    match settings.mode:
        case CaptureMode.merge:
            from eagle3.capturing.merging import merge

            merged = merge(settings, print_line)
            print_line(f"merged:   {merged.num_samples:,} documents in {settings.out}")
        case CaptureMode.verify:
            from eagle3.capturing.verifying import verify

            verify(settings, print_line)
        case CaptureMode.forecast:
            from eagle3.capturing.running import forecast

            print_line(forecast(plan_capture(settings)))
        case CaptureMode.capture:
            from eagle3.capturing.running import capture

            found = capture(plan_capture(settings), print_line)
            for line in found.failed:
                print_line(f"left out: {line}")
            print_line(
                f"captured: {found.documents:,} documents, {found.tokens:,} tokens, "
                f"{len(found.failed)} left out, in {found.directory}"
            )


if __name__ == "__main__":
    sys.exit(entry_point(run, command=CAPTURE))
