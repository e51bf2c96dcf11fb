"""Calls a function on several ranks so that all of them leave with the same outcome.

Every rank does its share and may fail. The results *and the failures* travel in one gather, so every rank
learns of a full disk on rank 1 before anything is published, and all of them raise the same error in the same
place. The outcome of a function that only rank 0 runs is broadcast, including its failure. Without a group
there is one rank, and nothing is sent.

The process group is a gloo group. It carries small Python objects between the processes of one job, never
the content of a file.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from narrowgauge.system.collectives import Group, broadcast_object, gather_objects, rank_in, size_of
from narrowgauge.system.errors import UserError

T = TypeVar("T")
Wrap = Callable[[str], UserError]  # the operating system's message -> the error to raise


def on_all_ranks(do: Callable[[], T], group: Group | None, wrap: Wrap) -> list[T]:
    """Call a function on every rank of a group (None: this process alone); returns all results in rank order.

    `wrap` makes the error to raise from the reason of an `OSError`. If the function raised a `UserError` on
    some rank, every rank raises that of the first such rank, with the rank's name if there are several. Any
    other error is a bug: it is raised unchanged where it happened, and as an error of `wrap` on the other
    ranks.
    """
    outcome, cause = _attempt(do, group, wrap)
    results = gather_objects(outcome, group)
    _raise_failure(results, cause)
    return results  # type: ignore[return-value]  # none is a failure


def on_rank0(do: Callable[[], T], group: Group | None, wrap: Wrap) -> T:
    """Call a function on rank 0 alone; returns its result, or raises its error, on every rank."""
    outcome, cause = _attempt(do, group, wrap) if rank_in(group) == 0 else (None, None)
    outcome = broadcast_object(outcome, group)
    _raise_failure([outcome], cause)
    return outcome  # type: ignore[return-value]  # rank 0 filled it


def _attempt(do: Callable[[], T], group: Group | None, wrap: Wrap) -> tuple[T | UserError, Exception | None]:
    """(the result or the failure to send, the original error)."""
    where = f"rank {rank_in(group)}: " if size_of(group) > 1 else ""
    try:
        return do(), None
    except UserError as error:
        return type(error)(f"{where}{error}"), error
    except Exception as error:
        reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return wrap(f"{where}{reason}"), error


def _raise_failure(outcomes: Sequence[object], local_error: Exception | None) -> None:
    """Raise the first failure, or this rank's own error if it is a bug, whose traceback is more useful."""
    failure = next((outcome for outcome in outcomes if isinstance(outcome, UserError)), None)
    if failure is not None and local_error is not None and not isinstance(local_error, UserError | OSError):
        raise local_error
    if failure is not None:
        raise failure from local_error
