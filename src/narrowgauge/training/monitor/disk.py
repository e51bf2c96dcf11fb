"""Is there room for what a run will write? Bytes, and inodes: a disk can be full of small files, too.

A run keeps `checkpoint.keep` checkpoints and makes the next one before the oldest goes, so it needs room for
one more than it keeps. The size is that of the tensors themselves, counted from a session. It is asked before
the first step, where it is cheap to choose another disk; each save asks for itself (`checkpoint.space`).
"""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

from narrowgauge.checkpoint import steps
from narrowgauge.errors import UserError
from narrowgauge.training.step.trainer import Trainer
from narrowgauge.units import human_bytes

_BESIDE = 4  # inodes beside those of tensors: index, state, manifest, the directory
_SLACK = 1 << 16  # bytes of each of its files: headers, and the last block


@dataclass(frozen=True)
class Room:
    """Bytes and inodes; `inodes` is None where a file system has no fixed number of them."""

    bytes: int
    inodes: int | None

    def times(self, count: int) -> "Room":
        """The same, `count` times."""
        return Room(self.bytes * count, None if self.inodes is None else self.inodes * count)

    def is_in(self, free: "Room") -> bool:
        """Whether there is so much."""
        known = self.inodes is not None and free.inodes is not None
        return self.bytes <= free.bytes and (not known or (self.inodes or 0) <= (free.inodes or 0))

    def __str__(self) -> str:
        return f"{human_bytes(self.bytes)}" + ("" if self.inodes is None else f" and {self.inodes} inodes")


def checkpoint_room(trainer: Trainer) -> Room:
    """What one checkpoint of all processes takes; two names of a tensor are stored once."""
    here: dict[tuple[int, int], int] = {}
    groups = trainer.pieces()
    for named in groups.values():
        for pieces in named.values():
            for piece in pieces:
                size = prod(piece.shape) * piece.tensor.element_size()
                here[piece.tensor.data_ptr(), piece.tensor.nbytes] = size // len(pieces)
    engine = trainer.engine
    [told] = engine.sum_over_ranks([sum(here.values())])  # each process of a stage has told of all of it
    files = len(groups) * engine.mesh.parallel_dims.size + _BESIDE
    return Room(round(told / engine.mesh.size("stage")) + files * _SLACK, files)


def free_room(path: Path) -> Room:
    """What this user may still write under a path, which need not exist yet. Raises `OSError`."""
    while not path.exists() and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    return Room(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


def require_disk(checkpoints: Path, one: Room, keep: int) -> None:
    """Refuse to train where the checkpoints cannot be kept; those that are there already count.

    Raises:
        UserError: with what is needed, what is free, and the way out.
    """
    count = keep + 1 - min(keep, len(steps(checkpoints)))
    needed, free = one.times(count), free_room(checkpoints)
    if not needed.is_in(free):
        raise UserError(
            f"{str(checkpoints)!r} needs {needed}, for {count} more checkpoints of {one} (checkpoint.keep = "
            f"{keep}, and one that is being made), and its disk has {free} free; free some, lower "
            "checkpoint.keep, or name a directory on another disk with --out"
        )
