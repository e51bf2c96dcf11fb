"""What the processes of a run tell each other in a store: who is there, and which failure was the first.

The store of keys and values is PyTorch's `TCPStore`. torchrun keeps one in its own process; otherwise rank 0
keeps it, at the address and port of its `World`. Each process registers there and waits for the others. Only
then are process groups created, which would wait for a missing rank without naming it.

A rank that fails publishes the cause in the store before its connections close. The others then see
connection errors. A rank that sees one reads the first failure from the store, and raises that instead. A
killed rank leaves no record; the watchdog detects it by its missing heartbeat.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from narrowgauge.system.errors import EXIT_FAILED, EXIT_PREEMPTED, Failed, UserError, words_of
from narrowgauge.system.processes import in_time
from narrowgauge.system.signals import StoppedEarly, raise_pending_stop
from narrowgauge.trainer.distributed.launch.world import World

RENDEZVOUS = "NARROWGAUGE_RENDEZVOUS"  # in the environment: a name for each of several runs of one launcher
_POLL_S = 0.1
NEVER = timedelta(days=30)
MEET_S = 10.0  # how long a rank that is asked to stop waits for ranks that do not know of it yet
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


def open_store(world: World, environ: Mapping[str, str], timeout_s: float, keep: bool = False) -> Store:
    """A new connection to the store; with `keep` this process also starts the store.

    Raises:
        UserError: the port is taken, the host's name is unknown, or no store answers in time.
    """
    where = f"{world.master_addr}:{world.master_port}"
    try:
        socket.getaddrinfo(world.master_addr, world.master_port)
    except (socket.gaierror, UnicodeError) as error:  # torch asks for minutes, and then blames the port
        raise UserError(
            f"no host has the name {world.master_addr!r}, at which the ranks meet ({words_of(error)}); set "
            "MASTER_ADDR to the name or address of the host of rank 0"
        ) from None
    if not keep:
        _wait_until_open(world, timeout_s)

    def connect() -> Store | Exception:
        try:
            timeout = timedelta(seconds=timeout_s)
            address = (world.master_addr, world.master_port)
            return TCPStore(*address, is_master=keep, timeout=timeout, wait_for_workers=False)
        except Exception as error:
            return error

    late: Store | Exception = TimeoutError()  # another program may listen there and never answer
    store = in_time(connect, timeout_s, late)
    if isinstance(store, Exception) and keep:
        why = "is in use" if "in use" in str(store) else f"cannot be opened ({store})"
        raise UserError(
            f"port {world.master_port}, at which the ranks were to meet, {why} on this host; "
            "set MASTER_PORT to a free one for all of them, or end the job that uses it"
        )
    if isinstance(store, Exception):
        raise UserError(
            f"something other than rank 0 of this run answers at {where}; set MASTER_PORT to a free port"
        ) from store
    attempt, name = environ.get("TORCHELASTIC_RESTART_COUNT", "0"), environ.get(RENDEZVOUS, "")
    return PrefixStore(f"narrowgauge/{attempt}/{name}", store)


def _wait_until_open(world: World, timeout_s: float) -> None:
    """Wait until the port is open. PyTorch's own wait cannot be interrupted, and prints stacks of C++."""
    where, deadline = f"{world.master_addr}:{world.master_port}", time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((world.master_addr, world.master_port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {world.rank} finds no store at {where} after {timeout_s:g} s: {words_of(error)}; "
                    "see whether rank 0 was started and is on that host"
                ) from None
        raise_pending_stop(MEET_S)
        time.sleep(_POLL_S)


def register(store: Store, world: World, timeout_s: float) -> None:
    """Register this process in the store, and wait until all have.

    The `UserError` names missing ranks, a rank registered twice, or processes of another WORLD_SIZE.
    """
    size = store.compare_set("size", "", str(world.size)).decode()
    if size != str(world.size):
        raise UserError(
            f"rank {world.rank} was started as one of {world.size} processes, and another as one of {size}; "
            "start all of them with the same WORLD_SIZE"
        )
    local = json.dumps(f"process {os.getpid()} on host {socket.gethostname()}")
    registered = store.compare_set(f"here/{world.rank}", "", local).decode()
    if registered != local:
        raise UserError(
            f"rank {world.rank} has joined already, as {json.loads(registered)}; give each process its own "
            "RANK, and each job its own MASTER_PORT"
        )
    store.add("arrived", 1)
    deadline = time.monotonic() + timeout_s
    while True:
        if Failure.find(store) is not None:
            raise PeerGone("another rank has ended the run while this one waited for the others")
        if store.add("arrived", 0) >= world.size:
            return
        if time.monotonic() > deadline:
            raise UserError(
                f"after {timeout_s:g} s {_missing(store, world)}; see whether all were started, and whether "
                "WORLD_SIZE is their number"
            )
        time.sleep(_POLL_S)


def await_leavers(store: Store, seconds: float, ranks: int = 0) -> None:
    """Wait, at most `seconds`, until all registered processes, and at least `ranks`, have left the store."""
    deadline = time.monotonic() + seconds
    while store.add("left", 0) < max(ranks, store.add("arrived", 0)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def name_of(store: Store, rank: int) -> str:
    """A rank with its process and host, if it was ever registered."""
    known = store.check([f"here/{rank}"])
    return f"rank {rank} ({json.loads(store.get(f'here/{rank}'))})" if known else f"rank {rank}"


def _missing(store: Store, world: World) -> str:
    missing = [str(rank) for rank in range(world.size) if not store.check([f"here/{rank}"])]
    listed = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    ranks = "rank" if len(missing) == 1 else "ranks"
    return f"{world.size - len(missing)} of {world.size} ranks are here, and {ranks} {listed} missing"


def make_groups(world: World, device: torch.device, store: Store, hang_s: float) -> dist.ProcessGroup:
    """Create the default group, whose timeout is longer than the watchdog's, and a gloo group for control.

    Returns:
        The control group. It never times out, because rank 0 may prepare the data for hours.

    Raises:
        UserError: the ranks are registered in the store, but cannot connect to each other.
    """
    timeout = timedelta(seconds=4 * hang_s + 60) if hang_s else NEVER
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=PrefixStore("torch", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        return dist.new_group(backend="gloo", timeout=NEVER)
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            f"rank {world.rank} is in the store and cannot connect to the other ranks ({error}); name "
            "the network between the nodes in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if they have several"
        ) from error
