"""The reports while something is prepared once, for the cache."""

from collections.abc import Callable

# (stage, bytes done, total bytes or 0 if not known, further facts in words)
Progress = Callable[[str, int, int, str], None]


def no_progress(stage: str, done: int, total: int, facts: str) -> None:
    """Ignore a report."""
