"""Ends a run that hangs, with the stacks of all ranks and the name of the rank that the others wait for.

The main thread of a rank reports its progress: each step, each save. Two threads watch it, by a connection to
the store of their own, so that they work while the main thread is stuck in a collective. Twice a second

- one publishes a heartbeat (a count, and how far the main thread is), and reads whether some rank has ended
  the run (`failure.Failure`); then it ends this rank as well if its main thread cannot, because it waits for
  a rank that is gone. A store that does not answer blocks this thread alone;
- the other counts the rounds since the last progress. After too many it ends the run for all: every rank
  writes the stacks of its threads to RUN/hang/rank-N.txt, and the first one reports which ranks are late. A
  rank without a heartbeat was stopped or killed, or its machine is gone.

Time is counted in rounds, not by a clock: a job that its scheduler suspends counts none, and is not
considered hung when it resumes.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from narrowgauge.system.processes import in_time
from narrowgauge.trainer.distributed.launch.world import World
from narrowgauge.trainer.distributed.process_group.failure import EXIT_FAILED, Failure, store_gone
from narrowgauge.trainer.distributed.process_group.rendezvous import name_of

HEARTBEAT_S = 0.5
_MISSED_HEARTBEATS = 5  # a rank that sends none during this many of ours is considered gone
_GRACE_HEARTBEATS = 20  # how long a main thread may take to end by itself
_REPORT = "report"

T = TypeVar("T")


class Watchdog:
    """Watches the main thread of this rank, and the failures of others.

    Attributes:
        patience_s: seconds without progress that count as a hang; 0: no limit.
        directory: the run directory, for the stacks; None until it is this run's.
        report_cause: called with the cause of a hang, on the rank that detected it.
        hang_detected: whether this rank knows of a hang.
        end: the failure that another rank published.
    """

    def __init__(self, world: World, store: Store, patience_s: float) -> None:
        self.world, self.patience_s, self._store = world, patience_s, store
        self.directory: Path | None = None
        self.report_cause: Callable[[str], None] = lambda sentence: None
        self.hang_detected = False
        self.end: Failure | None = None
        self._location, self._progress_count, self._patience = "the start", 0, 1.0
        self._heartbeat_count = self._without_progress = 0
        self._done = threading.Event()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._beat, self._count)]
        for thread in self._threads:
            thread.start()

    def progress(self, place: str, patience: float = 1.0) -> None:
        """Record that the main thread is at `place`, where it may stay `patience` times as long as usual; all
        ranks reach the same places in the same order."""
        self._location, self._patience, self._without_progress = place, patience, 0
        self._progress_count += 1

    def stop(self) -> None:
        """Stop watching: from here, the main thread ends by itself."""
        if not self._done.is_set():
            self._done.set()
            for thread in self._threads:
                thread.join(timeout=5)

    def ranks_without_heartbeat(self) -> list[int]:
        """The ranks whose heartbeat count does not change; takes two seconds."""
        before = self._heartbeats()
        self._done.wait(_MISSED_HEARTBEATS * HEARTBEAT_S)
        after = self._heartbeats()
        return [r for r in range(self.world.size) if before[r][0] == after[r][0] and r != self.world.rank]

    def _beat(self) -> None:
        try:
            while not self._done.wait(HEARTBEAT_S):
                self._send_heartbeat()
                end = Failure.find(self._store)
                if end is not None and end.rank != self.world.rank:
                    self.end = end
                    self._leave(end)
                    return
        except RuntimeError:
            self._leave(store_gone(self.world))

    def _send_heartbeat(self) -> None:
        self._heartbeat_count += 1
        heartbeat = [self._heartbeat_count, self._progress_count, self._location]
        self._store.set(f"heartbeat/{self.world.rank}", json.dumps(heartbeat))

    def _leave(self, end: Failure) -> None:
        """End the process, unless its main thread does so in time; after a hang, when it is reported."""
        self.patience_s = 0.0  # no timeout from here on
        if end.hang:
            self.hang_detected = True
            self._dump_stacks()
            with suppress(RuntimeError):  # the store may go first
                for _ in range(_GRACE_HEARTBEATS):
                    self._send_heartbeat()
                    if self._store.check([_REPORT]):
                        break
                    time.sleep(HEARTBEAT_S)
            self._exit("")
        if not self._done.wait(_GRACE_HEARTBEATS * HEARTBEAT_S):
            self._exit(end.as_seen_by_peers() if end.is_reported_by(self.world) else "", end.code)

    def _exit(self, sentence: str, code: int = EXIT_FAILED) -> None:
        if sentence:
            print(f"narrowgauge: {sentence}", file=sys.stderr, flush=True)
        os._exit(code)  # the main thread may be stuck where it never returns

    def _count(self) -> None:
        while not self._done.wait(HEARTBEAT_S):
            self._without_progress += 1
            if self.patience_s and self._without_progress * HEARTBEAT_S > self.patience_s * self._patience:
                return self._end_hang()

    def _end_hang(self) -> None:
        """End the run after too long without progress, and report which ranks are late."""
        self.hang_detected = True
        self._dump_stacks()
        waited = f"nothing moved for {self.patience_s * self._patience:g} s"
        mine = Failure(self.world.rank, EXIT_FAILED, waited, hang=True)
        first = self._ask(lambda: mine.publish(self._store))
        if first is not None and first.rank != self.world.rank:
            return  # the other thread sees it too
        late = self._ask(self._who_is_late) if first is not None else None
        sentence = (
            f"{waited}: {late or f'rank 0 or its launcher does not answer at {self.world.master_addr}'}"
        )
        if self.directory is not None:
            sentence += f"; the stacks of the ranks are in {self.directory / 'hang'}"
        self.report_cause(sentence)
        self._ask(lambda: self._store.set(_REPORT, sentence))
        self._exit(sentence)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """What the store answers; None if it is silent, or gone."""

        def ask() -> T | None:
            with suppress(RuntimeError):
                return question()
            return None

        return in_time(ask, 10.0, None)

    def _who_is_late(self) -> str:
        """The ranks without a heartbeat, else those that are behind, else where all of them are."""
        missing = self.ranks_without_heartbeat()
        heartbeats = self._heartbeats()
        furthest = max(count for _, count, _ in heartbeats)
        late = missing or [r for r, (_, count, _) in enumerate(heartbeats) if count < furthest]
        if not late:
            return f"all {self.world.size} ranks are at {self._location}"
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

    def _dump_stacks(self) -> None:
        """Write the stacks of all threads of this process to RUN/hang/rank-N.txt or standard error."""
        in_time(self._write_stacks, 5.0, None)  # the disk itself may hang

    def _write_stacks(self) -> None:
        place = f"rank {self.world.rank}, process {os.getpid()}, at {self._location}, {datetime.now():%F %T}"
        if self.directory is None:
            faulthandler.dump_traceback()
            return
        folder = self.directory / "hang"
        try:
            folder.mkdir(exist_ok=True)
            with (folder / f"rank-{self.world.rank}.txt").open("w") as file:
                print(place, file=file, flush=True)
                faulthandler.dump_traceback(file)
        except OSError:
            faulthandler.dump_traceback()
