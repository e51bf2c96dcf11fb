"""Progress reports of work whose result is cached, such as the preparation of a corpus."""

from collections.abc import Callable

# (stage, bytes done, total bytes or 0 if unknown, further facts as text)
Progress = Callable[[str, int, int, str], None]


def no_progress(stage: str, done: int, total: int, facts: str) -> None:
    """Ignore a report."""
