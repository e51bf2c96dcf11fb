"""Reports the first failure of a run, when one rank fails and all others fail because of it.

A rank that fails publishes the cause in the store before its connections close. The others then see
connection errors. A rank that sees one reads the first failure from the store, and raises that instead. A
killed rank leaves no record; the watchdog detects it by its missing heartbeat.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from narrowgauge.system.errors import EXIT_FAILED, EXIT_PREEMPTED, Failed, UserError
from narrowgauge.system.processes import in_time
from narrowgauge.system.signals import StoppedEarly
from narrowgauge.trainer.distributed.launch.world import World

_KEY = "end"

# Words in PyTorch's errors which mean that a peer is gone, if the error's class does not show it.
_CONNECTION_WORDS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "c10d",
    "tcpstore",
)


class PeerGone(RuntimeError):
    """Another rank has ended the run, so waiting for the others is useless."""


class StoppedByPeer(Failed):
    """This rank ends because of another, with its exit code; prints the sentence if `is_printed`."""

    def __init__(self, sentence: str, code: int, is_printed: bool) -> None:
        super().__init__(sentence)
        self.code, self.is_printed = code, is_printed


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause of a run's end; `reporter` is the rank that published it, if not the failed `rank`."""

    rank: int
    code: int
    sentence: str
    reporter: int = -1
    hang: bool = False

    def publish(self, store: Store) -> "Failure":
        """Publish this failure if it is the first; returns the first."""
        return Failure._read(store.compare_set(_KEY, "", json.dumps(asdict(self))))

    @staticmethod
    def find(store: Store) -> "Failure | None":
        """The published failure."""
        return Failure._read(store.get(_KEY)) if store.check([_KEY]) else None

    @staticmethod
    def _read(value: bytes) -> "Failure":
        return Failure(**json.loads(value))

    def is_reported_by(self, world: World) -> bool:
        """Whether a rank that is not the cause prints it: the first of each node, and the reporter."""
        is_printer = world.local_rank == 0 or world.rank == self.reporter
        return self.code == EXIT_FAILED and not self.hang and is_printer

    def as_seen_by_peers(self) -> str:
        """The sentence of the other ranks."""
        return f"stopped, because rank {self.rank} failed: {self.sentence}"


def store_gone(world: World) -> Failure:
    """The failure of a rank that cannot reach the store; rank 0, the likely cause, may not report it."""
    where = f"{world.master_addr}:{world.master_port}"
    reporter = world.rank if world.local_rank == 1 else -1
    return Failure(0, EXIT_FAILED, f"it or its launcher is gone from {where}", reporter)


def failure_of(error: BaseException, rank: int) -> Failure:
    """The failure that a rank publishes for its error."""
    if isinstance(error, StoppedEarly):
        return Failure(rank, EXIT_PREEMPTED, f"stopped by {error}")
    if isinstance(error, UserError):
        return Failure(rank, error.exit_code, str(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, EXIT_FAILED, "interrupted")
    return Failure(rank, EXIT_FAILED, f"{type(error).__name__}: {error}".rstrip(": "))


def is_connection_error(error: BaseException) -> bool:
    """Whether an error, or one that led to it, means that other ranks cannot be reached."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower() if isinstance(seen, RuntimeError) else ""
        if isinstance(seen, (dist.DistError, PeerGone)) or any(word in text for word in _CONNECTION_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def await_failure(store: Store, seconds: float) -> Failure | None:
    """The failure that some rank publishes within `seconds`."""
    deadline = time.monotonic() + seconds
    while (end := Failure.find(store)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return end


def report_to_torchrun(error: BaseException) -> None:
    """Record the first cause in the file from which torchrun prints its summary."""
    if isinstance(error, Exception) and os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().record_exception(error)


def keep(directory: Path | None, kind: str, rank: int, place: str, write: Callable[[TextIO], object]) -> bool:
    """Let `write` fill DIRECTORY/KIND/rank-N.txt; whether it could, in time."""

    def fill() -> bool:
        with suppress(OSError):  # a full or lost disk may be the failure itself
            folder.mkdir(exist_ok=True)
            with (folder / f"rank-{rank}.txt").open("w", encoding="utf-8", errors="backslashreplace") as file:
                at = f"rank {rank}, process {os.getpid()}, at {place}, {datetime.now():%F %T}"
                print(at, file=file, flush=True)
                write(file)
            return True
        return False

    folder = (directory or Path()) / kind
    return directory is not None and in_time(fill, 5.0, False)  # the disk itself may hang
