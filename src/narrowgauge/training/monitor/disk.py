"""Checks the disk space for the checkpoints of a run: bytes, and inodes, which small files can use up.

A run keeps `checkpoint.keep` checkpoints and writes the next one before it deletes the oldest, so it needs
space for one more. The size is the sum of the tensors of a trainer. The check runs before the first step,
when it is cheap to choose another disk; each save checks again.
"""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

from narrowgauge.checkpoint import steps
from narrowgauge.errors import UserError
from narrowgauge.training.step.trainer import Trainer
from narrowgauge.units import human_bytes

_EXTRA_INODES = 4  # index, state, manifest, the directory
_SLACK = 1 << 16  # bytes for each file: headers, and the last block


@dataclass(frozen=True)
class DiskSpace:
    """Bytes and inodes; `inodes` is None if the file system has no fixed number of them."""

    bytes: int
    inodes: int | None

    def times(self, count: int) -> "DiskSpace":
        """`count` times this space."""
        return DiskSpace(self.bytes * count, None if self.inodes is None else self.inodes * count)

    def fits_in(self, free: "DiskSpace") -> bool:
        """Whether `free` is at least this space."""
        known = self.inodes is not None and free.inodes is not None
        return self.bytes <= free.bytes and (not known or (self.inodes or 0) <= (free.inodes or 0))

    def __str__(self) -> str:
        return f"{human_bytes(self.bytes)}" + ("" if self.inodes is None else f" and {self.inodes} inodes")


def checkpoint_space(trainer: Trainer) -> DiskSpace:
    """The space of one checkpoint of all processes; a tensor with two names is stored once."""
    local_bytes: dict[tuple[int, int], int] = {}
    groups = trainer.pieces()
    for named in groups.values():
        for pieces in named.values():
            for piece in pieces:
                size = prod(piece.shape) * piece.tensor.element_size()
                local_bytes[piece.tensor.data_ptr(), piece.tensor.nbytes] = size // len(pieces)
    engine = trainer.engine
    # every process of a stage counts all tensors of the stage
    [total] = engine.sum_over_ranks([sum(local_bytes.values())])
    files = len(groups) * engine.mesh.parallel_dims.size + _EXTRA_INODES
    return DiskSpace(round(total / engine.mesh.size("stage")) + files * _SLACK, files)


def free_space(path: Path) -> DiskSpace:
    """The space that this user may still write under a path, which need not exist yet.

    Raises:
        OSError: the file system does not answer.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    stat = os.statvfs(path)
    return DiskSpace(stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else None)


def require_disk(checkpoints: Path, one: DiskSpace, keep: int) -> None:
    """Refuse to train if the disk cannot hold the checkpoints; existing ones need no more space.

    Args:
        checkpoints: the directory of the checkpoints.
        one: the space of one checkpoint.
        keep: the number of checkpoints that the run keeps.

    Raises:
        UserError: the disk is too small; the message has the needed space, the free space and the ways out.
    """
    count = keep + 1 - min(keep, len(steps(checkpoints)))
    needed, free = one.times(count), free_space(checkpoints)
    if not needed.fits_in(free):
        raise UserError(
            f"{str(checkpoints)!r} needs {needed}, for {count} more checkpoints of {one} (checkpoint.keep = "
            f"{keep}, and one that is being made), and its disk has {free} free; free some, lower "
            "checkpoint.keep, or name a directory on another disk with --out"
        )
