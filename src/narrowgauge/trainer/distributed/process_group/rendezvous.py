"""Connects the processes of a run, and names those that are missing.

They meet in a store of keys and values (PyTorch's `TCPStore`). torchrun keeps one in its own process;
otherwise rank 0 keeps it, at the address and port of its `World`. Each process registers there and waits for
the others. Only then are process groups created, which would wait for a missing rank without naming it.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from narrowgauge.system.errors import UserError, words_of
from narrowgauge.system.processes import in_time
from narrowgauge.system.signals import heed_early
from narrowgauge.trainer.distributed.launch.world import World
from narrowgauge.trainer.distributed.process_group.failure import Failure, PeerGone

RENDEZVOUS = "NARROWGAUGE_RENDEZVOUS"  # in the environment: a name for each of several runs of one launcher
_POLL_S = 0.1
NEVER = timedelta(days=30)
MEET_S = 10.0  # how long a rank that is asked to stop waits for ranks that do not know of it yet


def hosts_store(world: World, environ: Mapping[str, str]) -> bool:
    """Whether this process keeps the store: rank 0, unless torchrun does."""
    return world.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


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
        heed_early(MEET_S)
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


def leave(store: Store) -> None:
    """Record that this process no longer reads the store."""
    store.add("left", 1)


def await_leavers(store: Store, seconds: float, ranks: int = 0) -> None:
    """Wait until all registered processes, and at least `ranks`, have left; at most `seconds`."""
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
