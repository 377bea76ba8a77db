"""Shapes and dtypes in signatures are checked in every test, and cost nothing outside of tests."""

import signal

from hypothesis import settings
from jaxtyping import install_import_hook

install_import_hook(
    ["eagle3.data.batch", "eagle3.model", "eagle3.ops", "eagle3.objective"], "beartype.beartype"
)
# No test judges by time: a busy machine would fail it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# Shells start background jobs with SIGINT ignored, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
