"""How do several processes do one thing, and all leave with the same outcome?

Every rank does its part and may fail in it. The results *and the failures* travel in one gather, so a full
disk on rank 1 is known to every rank before anything is published, and all of them raise the same error
in the same place. What only rank 0 does is told to the others, its failure too. Without a group there is one
rank, and nothing is sent.

The group is one of gloo: what is sent are small Python objects between the processes of one job, never
anything from a file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch.distributed as dist

from narrowgauge.errors import UserError

T = TypeVar("T")
Wrap = Callable[[str], UserError]  # what the operating system said, in a sentence for people


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on a rank, in a form that can be sent; `kind` is raised everywhere."""

    rank: int
    kind: type[UserError]
    sentence: str


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's number in the group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    """How many processes are in the group; 1 without one."""
    return 1 if group is None else dist.get_world_size(group)


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The value of every rank, in order, on every rank."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * size_of(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]  # each was filled


def on_all_ranks(do: Callable[[], T], group: dist.ProcessGroup | None, wrap: Wrap) -> list[T]:
    """Do something on every rank; the results of all, in order.

    Where it fails on any rank, all ranks raise the failure of the first of them, and the sentence names that
    rank if there are several. An `OSError` becomes what `wrap` makes of it. Any other error is a bug: it is
    raised as it is where it happened, and as `wrap`'s on the other ranks.
    """
    mine, cause = _attempt(do, group, wrap)
    results: list[T] = []
    for result in gather(mine, group):
        if isinstance(result, RankFailure):
            _raise(result, cause)
        results.append(result)
    return results


def on_rank0(do: Callable[[], T], group: dist.ProcessGroup | None, wrap: Wrap) -> T:
    """Do something on rank 0 alone; its result, or the error it raised, on every rank."""
    told: list[T | RankFailure | None] = [None]
    cause: Exception | None = None
    if rank_in(group) == 0:
        told[0], cause = _attempt(do, group, wrap)
    if group is not None:
        dist.broadcast_object_list(told, src=dist.get_global_rank(group, 0), group=group)
    if isinstance(told[0], RankFailure):
        _raise(told[0], cause)
    return told[0]  # type: ignore[return-value]  # rank 0 filled it


def _attempt(
    do: Callable[[], T], group: dist.ProcessGroup | None, wrap: Wrap
) -> tuple[T | RankFailure, Exception | None]:
    """The result, or the failure to send and the error it was."""
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


def _raise(failure: RankFailure, own: Exception | None) -> NoReturn:
    """Raise a failure, or this rank's own where that is a bug, whose traceback is worth more."""
    if own is not None and not isinstance(own, UserError | OSError):
        raise own
    raise failure.kind(failure.sentence) from own
