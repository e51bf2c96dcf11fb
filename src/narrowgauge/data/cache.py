"""The cache of what is prepared once: its directory, and the reports while it is filled."""

import os
from collections.abc import Callable
from pathlib import Path

# (stage, bytes done, total bytes or 0 if not known, further facts in words)
Progress = Callable[[str, int, int, str], None]


def cache_directory() -> Path:
    """$NARROWGAUGE_CACHE, else `narrowgauge` in the user's cache directory."""
    if directory := os.environ.get("NARROWGAUGE_CACHE"):
        return Path(directory).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "narrowgauge"


def no_progress(stage: str, done: int, total: int, facts: str) -> None:
    """Ignore a report."""
