"""Engine releases: how they are written and ordered, and which of them are known."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.errors import ConfigError

Version = tuple[int, ...]

OLDEST_SGLANG, NEWEST_SGLANG = (0, 5, 9), (0, 5, 23)
OLDEST_VLLM = NEWEST_VLLM = (0, 33, 0)


def show(version: Version) -> str:
    """As people write it."""
    return ".".join(map(str, version))


def parse(key: str, text: str, oldest: Version) -> Version:
    """``0.5.14`` as numbers.

    Raises:
        ConfigError: no such form, or older than any release whose rules are known.
    """
    parts = text.removeprefix("v").split(".")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{key}={text}: expected a release such as {show(oldest)}")
    version = tuple(map(int, parts))
    if version < oldest:
        raise ConfigError(
            f"{key}={text}: found a release older than {show(oldest)}, whose rules are not known: "
            f"give {key}={show(oldest)} or a newer one, and serve with that"
        )
    return version


@dataclass(frozen=True)
class Change:
    """A rule that came somewhere after one release and at the latest with another."""

    absent: Version
    """Newest release that was seen without it."""
    present: Version
    """Oldest release that was seen with it."""

    def __str__(self) -> str:
        return f"from {show(self.present)} on (not in {show(self.absent)})"
