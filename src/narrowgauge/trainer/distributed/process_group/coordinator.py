"""Joins the process group, makes decisions that all ranks share, and ends all ranks at the first failure.

    with init_process_group(world, device) as coordinator:
        for step in ...:
            coordinator.progress(f"step {step}")
            ...
            asked = coordinator.all_reduce_max(asked=requests.number)["asked"]

Decisions are made only from values that are equal on all ranks, never from what one of them observed: a
signal that reached one rank, a clock, a full disk. Flags travel together, in one small all-reduce a step.

A run of one process has no store, no group and no thread; the same calls return their arguments.

**A run that hangs** is ended with the stacks of all ranks and the name of the rank that the others wait for.
The main thread of a rank reports its progress: each step, each save. Two threads of a `Watchdog` watch it,
and work while it is stuck in a collective. Twice a second

- one asks the store, by a connection of its own: it publishes a heartbeat (a count, and how far the main
  thread is), and reads whether some rank has ended the run (`store.Failure`); then it ends this rank as
  well if its main thread cannot, because it waits for a rank that is gone. After too long without progress
  it ends the run for all: every rank writes the stacks of its threads to RUN/hang/rank-N.txt, and the first
  one reports which ranks are late. A rank without a heartbeat was stopped or killed, or its machine is gone;
- the other counts the rounds since the last progress, and reports a hang itself if the first one is stuck,
  because the store does not answer.

Time is counted in rounds, not by a clock: a job that its scheduler suspends counts none, and is not
considered hung when it resumes.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import print_exception
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from narrowgauge.system.collectives import all_reduce_values, broadcast_object
from narrowgauge.system.errors import EXIT_FAILED, EXIT_PREEMPTED
from narrowgauge.system.processes import in_time
from narrowgauge.system.signals import Preempted, StoppedEarly, defer_stops, raise_pending_stop
from narrowgauge.trainer.distributed.launch.world import World
from narrowgauge.trainer.distributed.process_group.store import (
    MEET_S,
    Failure,
    StoppedByPeer,
    await_failure,
    await_leavers,
    failure_of,
    is_connection_error,
    keep,
    make_groups,
    name_of,
    open_store,
    register,
    store_gone,
)

HANG_S, RENDEZVOUS_S = 600.0, 300.0
START = 3.0  # patience for what happens once: restoring, compiling, the first step
_LINGER_S = 3.0  # how long a rank that keeps the store, or waits for a cause, stays for the others


class Coordinator:
    """A rank's connection to the others, made by `init_process_group`; `control` is a gloo group, or None for
    one process."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.rank, self.size = world.rank, world.size  # rank 0 writes the run directory
        self.control: dist.ProcessGroup | None = None
        self.watchdog: Watchdog | None = None
        self._store: Store | None = None
        self._has_ended = False

    def progress(self, place: str, patience: float = 1.0) -> None:
        """Report that this rank is at `place`, such as "step 12"; all ranks reach the same places in order.

        No progress for longer than the run's patience, times `patience`, is a hang.
        """
        if self.watchdog is not None:
            self.watchdog.progress(place, patience)

    def all_reduce_max(self, **flags: int) -> dict[str, int]:
        """The largest value of each flag over the ranks, which all pass the same names, once a step."""
        if self.control is None:
            return flags
        # on a GPU NCCL's tree is faster than gloo's ring, and the step ends with a value on the host anyway
        group, device = (None, self.device) if self.device.type == "cuda" else (self.control, "cpu")
        names = sorted(flags)
        values = [flags[name] for name in names]
        largest = all_reduce_values(values, [group], device, torch.int64, dist.ReduceOp.MAX)
        return dict(zip(names, map(int, largest), strict=True))

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on all ranks."""
        return broadcast_object(value, self.control)

    def record_failures_in(self, directory: Path, report_cause: Callable[[str], None]) -> None:
        """Write stacks (hang/) and tracebacks (errors/) to a directory, which must be this run's.

        `report_cause` is called with the cause of a failure that rank 0 may not survive to report: on the
        rank that detected it, in any thread.
        """
        if self.watchdog is not None:
            self.watchdog.directory, self.watchdog.report_cause = directory, report_cause

    @contextmanager
    def first_failure(self) -> Iterator[None]:
        """Replace an error by the first cause of the run's end: the error itself on the rank that has it,
        `StoppedByPeer` on all others. `init_process_group` enters one around everything; code that records
        the cause, such as the status, enters another one further inside."""
        try:
            yield
        except (Preempted, StoppedByPeer):
            raise
        except BaseException as error:
            if self._store is None or self._has_ended:
                raise
            self._has_ended = True
            defer_stops()
            self._end(self._store, error)
            raise

    def _end(self, store: Store, error: BaseException) -> None:
        """Publish the error, and return if it is the cause; raise `StoppedByPeer` if it follows from
        another."""
        watchdog, local_failure = self.watchdog, failure_of(error, self.rank)
        if local_failure.code == EXIT_FAILED and watchdog is not None:
            directory, place = watchdog.directory, watchdog.place
            keep(directory, "errors", self.rank, place, lambda file: print_exception(error, file=file))
        try:
            first = self._first_cause(store, error, local_failure)
        except RuntimeError:
            if not is_connection_error(error):
                return  # no rank can read it
            first = store_gone(self.world)
        while first.hang:
            time.sleep(60)  # until the watchdog has ended this process
        if watchdog is not None:
            watchdog.stop()
        with suppress(RuntimeError):  # the rank that keeps the store may have gone first
            store.add("left", 1)  # this rank no longer reads it
        if first.rank == 0 and first.reporter == self.rank and watchdog is not None:
            watchdog.report_cause(first.as_seen_by_peers())  # rank 0 is gone
        if first == local_failure:
            error.add_note(f"rank {self.rank} of {self.size}")
            if isinstance(error, Exception) and os.environ.get("TORCHELASTIC_ERROR_FILE"):
                get_error_handler().record_exception(error)  # for torchrun's summary
            return
        time.sleep(1)  # so that the rank with the cause prints it first
        is_printed = first.is_reported_by(self.world) and first.sentence != local_failure.sentence
        raise StoppedByPeer(first.as_seen_by_peers(), first.code, is_printed) from None

    def _first_cause(self, store: Store, error: BaseException, local_failure: Failure) -> Failure:
        if not is_connection_error(error):
            return local_failure.publish(store)
        reported = self.watchdog.end if self.watchdog is not None else None
        if (end := reported or await_failure(store, _LINGER_S)) is not None:
            return end
        if self.watchdog is not None and (missing := self.watchdog.ranks_without_heartbeat()):
            names = ", ".join(name_of(store, rank) for rank in missing[:8])
            sentence = f"{names} stopped sending heartbeats; if it was killed, rerun the command to resume"
            return Failure(missing[0], EXIT_FAILED, sentence, reporter=self.rank).publish(store)
        return local_failure.publish(store)


@contextmanager
def init_process_group(
    world: World,
    device: torch.device,
    hang_s: float = HANG_S,
    rendezvous_s: float = RENDEZVOUS_S,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Coordinator]:
    """Create the coordinator of a world, torch's default process group (gloo, with NCCL for a GPU) and
    `coordinator.control`; they end with the `with` block.

    Args:
        world: the result of `world_from`.
        device: the device of this rank.
        hang_s: seconds without progress that are a hang; 0: none is.
        rendezvous_s: seconds to wait for the other ranks at the start.
        environ: environment variables.

    Raises:
        UserError: the ranks cannot connect; names the missing ranks or the obstacle.
        StoppedByPeer: another rank is the cause of the end.
    """
    coordinator = Coordinator(world, device)
    if world.size == 1:
        raise_pending_stop()
        yield coordinator
        return
    hosts = world.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
    store = open_store(world, environ, rendezvous_s, keep=hosts)
    coordinator._store = store
    try:
        with coordinator.first_failure():
            raise_pending_stop()  # not before: the other ranks learn of a request from the store
            register(store, world, rendezvous_s)
            own_store = open_store(world, environ, rendezvous_s)
            coordinator.watchdog = Watchdog(world, own_store, hang_s)
            coordinator.progress("the start", START)
            coordinator.control = make_groups(world, device, store, hang_s)
            preempted = None
            try:
                yield coordinator
            except Preempted as stop:  # all ranks stop together, as at the normal end
                preempted = stop
            coordinator.watchdog.stop()
            coordinator.barrier()  # from here no rank reads the store
        dist.destroy_process_group()
        if preempted is not None:
            raise preempted
    except Preempted:
        raise
    except BaseException as error:
        if dist.is_initialized() and device.type == "cpu":  # with NCCL it could wait for ever
            coordinator.control = None
            dist.destroy_process_group()  # ends the waiting of the others
        if hosts:
            # the others have to read the cause, before the first step also ranks that have not arrived yet
            is_early = isinstance(error, StoppedEarly)  # some rank was asked to stop before a step
            is_early |= isinstance(error, StoppedByPeer) and error.code == EXIT_PREEMPTED
            is_stop = is_early or isinstance(error, KeyboardInterrupt)
            seconds = MEET_S if is_stop else _LINGER_S
            await_leavers(store, seconds, world.size if is_early else 0)
        raise
    finally:
        if coordinator.watchdog is not None:
            coordinator.watchdog.stop()


HEARTBEAT_S = 0.5
_MISSED_HEARTBEATS = 5  # a rank that sends none during this many of ours is considered gone
_GRACE_HEARTBEATS = 20  # how long a main thread may take to end by itself


class Watchdog:
    """Watches the main thread of this rank, and the failures of others.

    Attributes:
        place: where the main thread is.
        directory: the run directory, for the stacks; None until it is this run's.
        report_cause: called with the cause of a hang, on the rank that detected it.
        end: the failure that ends the run, once it is published.
    """

    def __init__(self, world: World, store: Store, patience_s: float) -> None:
        """Start to watch; `patience_s` without progress are a hang, 0: none is."""
        self.world, self._store, self._patience_s = world, store, patience_s
        self.directory: Path | None = None
        self.report_cause: Callable[[str], None] = lambda sentence: None
        self.end: Failure | None = None
        self.place, self._limit_s, self._progress_count = "the start", patience_s, 0
        self._heartbeat_count = self._without_progress = self._without_heartbeat = 0
        self._done = threading.Event()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._ask, self._count)]
        for thread in self._threads:
            thread.start()

    def progress(self, place: str, patience: float = 1.0) -> None:
        """Record that the main thread is at `place`, where it may stay `patience` times as long as usual; all
        ranks reach the same places in the same order."""
        self.place, self._limit_s, self._without_progress = place, self._patience_s * patience, 0
        self._progress_count += 1

    def stop(self) -> None:
        """Stop watching: from here, the main thread ends by itself."""
        if not self._done.is_set():
            self._done.set()
            for thread in self._threads:
                thread.join(timeout=5)

    def _ask(self) -> None:
        try:
            while not self._done.wait(HEARTBEAT_S):
                self._send_heartbeat()
                if self._is_overdue():
                    self._hang(self._who_is_late()).publish(self._store)
                self.end = Failure.find(self._store)
                if self.end is not None and (self.end.hang or self.end.rank != self.world.rank):
                    return self._leave(self.end)
        except RuntimeError:
            self._leave(store_gone(self.world))

    def _count(self) -> None:
        while not self._done.wait(HEARTBEAT_S):
            self._without_progress += 1
            self._without_heartbeat += 1
            if self._is_overdue() and self._without_heartbeat > _GRACE_HEARTBEATS:
                self._leave(self._hang(f"rank 0 or its launcher does not answer at {self.world.master_addr}"))

    def _send_heartbeat(self) -> None:
        self._heartbeat_count, self._without_heartbeat = self._heartbeat_count + 1, 0
        heartbeat = [self._heartbeat_count, self._progress_count, self.place]
        self._store.set(f"heartbeat/{self.world.rank}", json.dumps(heartbeat))

    def _is_overdue(self) -> bool:
        return 0 < self._limit_s < self._without_progress * HEARTBEAT_S

    def _hang(self, cause: str) -> Failure:
        sentence = f"nothing moved for {self._limit_s:g} s: {cause}"
        if self.directory is not None:
            sentence += f"; the stacks of the ranks are in {self.directory / 'hang'}"
        return Failure(self.world.rank, EXIT_FAILED, sentence, hang=True)

    def _leave(self, end: Failure) -> None:
        """End the process: at once after a hang, else unless its main thread does so in time."""
        sentence = end.as_seen_by_peers() if end.is_reported_by(self.world) else ""
        if end.hang:
            if not keep(self.directory, "hang", self.world.rank, self.place, faulthandler.dump_traceback):
                faulthandler.dump_traceback()
            if end.rank == self.world.rank:
                sentence = end.sentence
                in_time(lambda: self.report_cause(sentence), 5.0, None)  # the disk itself may hang
                self._done.wait(2)  # the others read it in the store, which goes with rank 0
        elif self._done.wait(_GRACE_HEARTBEATS * HEARTBEAT_S):
            return
        if sentence:
            print(f"narrowgauge: {sentence}", file=sys.stderr, flush=True)
        os._exit(end.code)  # the main thread may be stuck where it never returns

    def ranks_without_heartbeat(self) -> list[int]:
        """The ranks whose heartbeat count does not change; takes two seconds."""
        before = [count for count, _, _ in self._heartbeats()]
        for _ in range(_MISSED_HEARTBEATS):
            self._done.wait(HEARTBEAT_S)
            self._send_heartbeat()  # others may ask as well
        after = enumerate(self._heartbeats())
        return [rank for rank, (count, _, _) in after if count == before[rank] and rank != self.world.rank]

    def _who_is_late(self) -> str:
        """The ranks without a heartbeat, else those that are behind, else where all of them are."""
        missing = self.ranks_without_heartbeat()
        heartbeats = self._heartbeats()
        furthest = max(count for _, count, _ in heartbeats)
        late = missing or [r for r, (_, count, _) in enumerate(heartbeats) if count < furthest]
        if not late:
            return f"all {self.world.size} ranks are at {self.place}"
        verb = "does not answer" if missing else "did not arrive"
        names = [
            f"{name_of(self._store, r)} {verb}, and was last heard of at {heartbeats[r][2]}" for r in late[:8]
        ]
        return ", ".join(names) + (f", and {len(late) - 8} more" if len(late) > 8 else "")

    def _heartbeats(self) -> list[tuple[int, int, str]]:
        """(heartbeats, progress, place) of every rank; zeros for one without a heartbeat so far."""
        keys = [f"heartbeat/{rank}" for rank in range(self.world.size)]
        none = b'[0, 0, "no place"]'
        return [tuple(json.loads(self._store.get(k) if self._store.check([k]) else none)) for k in keys]
