"""Calls a function on several ranks so that all of them leave with the same outcome.

Every rank does its share and may fail. The results *and the failures* travel in one gather, so every rank
learns of a full disk on rank 1 before anything is published, and all of them raise the same error in the same
place. The outcome of a function that only rank 0 runs is broadcast, including its failure. Without a group
there is one rank, and nothing is sent.

The process group is a gloo group. It carries small Python objects between the processes of one job, never
the content of a file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from narrowgauge.system.collectives import Group, broadcast_object, gather_objects, rank_in, size_of
from narrowgauge.system.errors import UserError

T = TypeVar("T")
Wrap = Callable[[str], UserError]  # the operating system's message -> the error to raise


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank, in a form that can be sent; every rank raises `error_type(sentence)`."""

    rank: int
    error_type: type[UserError]
    sentence: str


def on_all_ranks(do: Callable[[], T], group: Group | None, wrap: Wrap) -> list[T]:
    """Call a function on every rank of a group (None: this process alone); returns all results in rank order.

    `wrap` makes the error to raise from the reason of an `OSError`. If the function raised a `UserError` on
    some rank, every rank raises that of the first such rank, with the rank's name if there are several. Any
    other error is a bug: it is raised unchanged where it happened, and as an error of `wrap` on the other
    ranks.
    """
    outcome, cause = _attempt(do, group, wrap)
    results: list[T] = []
    for result in gather_objects(outcome, group):
        if isinstance(result, RankFailure):
            _raise(result, cause)
        results.append(result)
    return results


def on_rank0(do: Callable[[], T], group: Group | None, wrap: Wrap) -> T:
    """Call a function on rank 0 alone; returns its result, or raises its error, on every rank."""
    outcome: T | RankFailure | None = None
    cause: Exception | None = None
    if rank_in(group) == 0:
        outcome, cause = _attempt(do, group, wrap)
    outcome = broadcast_object(outcome, group)
    if isinstance(outcome, RankFailure):
        _raise(outcome, cause)
    return outcome  # type: ignore[return-value]  # rank 0 filled it


def _attempt(
    do: Callable[[], T], group: Group | None, wrap: Wrap
) -> tuple[T | RankFailure, Exception | None]:
    """(the result or the failure to send, the original error)."""
    rank = rank_in(group)
    where = f"rank {rank}: " if size_of(group) > 1 else ""
    try:
        return do(), None
    except UserError as error:
        return RankFailure(rank, type(error), f"{where}{error}"), error
    except Exception as error:
        reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        wrapped = wrap(f"{where}{reason}")
        return RankFailure(rank, type(wrapped), str(wrapped)), error


def _raise(failure: RankFailure, local_error: Exception | None) -> NoReturn:
    """Raise a failure, or this rank's own error if it is a bug, whose traceback is more useful."""
    if local_error is not None and not isinstance(local_error, UserError | OSError):
        raise local_error
    raise failure.error_type(failure.sentence) from local_error
