"""Work on several ranks that ends with the same outcome on all of them.

Every rank does its share and may fail in it. The results *and the failures* are gathered together, so a full
disk on rank 1 is known to every rank before anything is published, and all of them raise the same error
in the same place. The result or failure of work that only rank 0 does is broadcast. Without a group there is
one rank, and nothing is sent.

The process group is a gloo group. It carries small Python objects between the processes of one job, never
the content of a file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch.distributed as dist

from narrowgauge.errors import UserError

T = TypeVar("T")
Wrap = Callable[[str], UserError]  # makes a sentence for people of an error of the operating system


@dataclass(frozen=True)
class RankFailure:
    """A failure on a rank in a form that can be sent; every rank raises `error_type(sentence)`."""

    rank: int
    error_type: type[UserError]
    sentence: str


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Rank of this process in the group; 0 without a group."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    """Number of processes in the group; 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The value of every rank, in order, on every rank."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * size_of(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]  # each was filled


def on_all_ranks(do: Callable[[], T], group: dist.ProcessGroup | None, wrap: Wrap) -> list[T]:
    """Do something on every rank, and return the results of all ranks in order.

    Args:
        do: The work of this rank.
        group: A gloo group; None = this process alone.
        wrap: Makes the error for people of an `OSError`.

    Raises:
        UserError: it failed on any rank. All ranks raise the failure of the first of them, and the sentence
            names that rank if there are several.
        Exception: any other error is a bug. It is raised unchanged where it happened, and as the error of
            `wrap` on the other ranks.
    """
    local, cause = _attempt(do, group, wrap)
    results: list[T] = []
    for result in gather(local, group):
        if isinstance(result, RankFailure):
            _raise(result, cause)
        results.append(result)
    return results


def on_rank0(do: Callable[[], T], group: dist.ProcessGroup | None, wrap: Wrap) -> T:
    """Do something on rank 0 alone, and return its result, or raise its error, on every rank."""
    outcome: list[T | RankFailure | None] = [None]
    cause: Exception | None = None
    if rank_in(group) == 0:
        outcome[0], cause = _attempt(do, group, wrap)
    if group is not None:
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    if isinstance(outcome[0], RankFailure):
        _raise(outcome[0], cause)
    return outcome[0]  # type: ignore[return-value]  # rank 0 filled it


def _attempt(
    do: Callable[[], T], group: dist.ProcessGroup | None, wrap: Wrap
) -> tuple[T | RankFailure, Exception | None]:
    """The result, or the failure to send and the error behind it."""
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


def _raise(failure: RankFailure, local: Exception | None) -> NoReturn:
    """Raise a failure, or the error of this rank if that is a bug, for its traceback is worth more."""
    if local is not None and not isinstance(local, UserError | OSError):
        raise local
    raise failure.error_type(failure.sentence) from local
