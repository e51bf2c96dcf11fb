"""One rank fails, and all the others fail because of it: which of their errors is the one to read?

The first. A rank that fails publishes why in the store before its connections close. The others then see
connection errors. A rank that sees one reads the first failure from the store, and raises that instead. A
killed rank leaves no record; the watchdog detects it by its missing heartbeat.
"""

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from narrowgauge.distributed.launch.world import World
from narrowgauge.errors import UserError
from narrowgauge.signals import StoppedEarly

EXIT_FAILED, EXIT_USAGE, EXIT_PREEMPTED = 1, 2, 75
_KEY = "end"

# How PyTorch's collectives and stores tell that a peer is gone, where the error's class does not.
_CONNECTION_WORDS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "c10d",
    "tcpstore",
)


class PeerGone(RuntimeError):
    """There is no use in waiting for the other ranks: one of them has ended the run."""


class StoppedByPeer(Exception):
    """This rank ends because of another one, with its exit code; only where it `speaks` is that printed."""

    def __init__(self, sentence: str, code: int, speaks: bool) -> None:
        super().__init__(sentence)
        self.code, self.speaks = code, speaks


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ends, as the first rank that knew has written it: `reporter`, where it is not the cause."""

    rank: int
    code: int
    sentence: str
    reporter: int = -1
    hang: bool = False

    def publish(self, store: Store) -> "Failure":
        """Write it if it is the first; returns the first."""
        return Failure._read(store.compare_set(_KEY, "", json.dumps(asdict(self))))

    @staticmethod
    def find(store: Store) -> "Failure | None":
        """The one that was written."""
        return Failure._read(store.get(_KEY)) if store.check([_KEY]) else None

    @staticmethod
    def _read(value: bytes) -> "Failure":
        return Failure(**json.loads(value))

    def is_reported_by(self, world: World) -> bool:
        """Whether a rank that is not the cause prints it: a line for each node, and of who found it out."""
        return self.code == EXIT_FAILED and (world.local_rank == 0 or world.rank == self.reporter)

    def as_seen_by_peers(self) -> str:
        """What the other ranks say."""
        return f"stopped, because rank {self.rank} failed: {self.sentence}"


def store_gone(world: World) -> Failure:
    """What a rank has to say that finds no store any more; rank 0 of the first node may not speak for it."""
    where = f"{world.master_addr}:{world.master_port}"
    reporter = world.rank if world.local_rank == 1 else -1
    return Failure(0, EXIT_FAILED, f"it or its launcher is gone from {where}", reporter)


def failure_of(error: BaseException, rank: int) -> Failure:
    """What a rank has to say about its error."""
    if isinstance(error, StoppedEarly):
        return Failure(rank, EXIT_PREEMPTED, f"stopped by {error}")
    if isinstance(error, UserError):
        return Failure(rank, error.exit_code, str(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, EXIT_FAILED, "interrupted")
    return Failure(rank, EXIT_FAILED, f"{type(error).__name__}: {error}".rstrip(": "))


def is_connection_error(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says that other ranks cannot be reached."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower() if isinstance(seen, RuntimeError) else ""
        if isinstance(seen, (dist.DistError, PeerGone)) or any(word in text for word in _CONNECTION_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def await_failure(store: Store, seconds: float) -> Failure | None:
    """The end that some rank is about to write, if it does so in time."""
    deadline = time.monotonic() + seconds
    while (end := Failure.find(store)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return end


def report_to_torchrun(error: BaseException) -> None:
    """Leave the first cause where torchrun looks for what it prints last."""
    if isinstance(error, Exception) and os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().record_exception(error)


def keep_traceback(error: BaseException, rank: int, directory: Path | None) -> None:
    """Leave an error's traceback in DIRECTORY/errors/rank-N.txt."""
    if directory is None:
        return
    text = "".join(traceback.format_exception(error))
    try:
        folder = directory / "errors"
        folder.mkdir(exist_ok=True)
        (folder / f"rank-{rank}.txt").write_text(f"{datetime.now():%F %T}, process {os.getpid()}\n{text}")
    except OSError:
        pass  # a disk that is full or gone may well be the error; it is told without the file too
