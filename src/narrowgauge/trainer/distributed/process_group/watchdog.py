"""Ends a run that hangs, with the stacks of all ranks and the name of the rank that the others wait for.

The main thread of a rank reports its progress: each step, each save. Two threads watch it, and work while it
is stuck in a collective. Twice a second

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
from collections.abc import Callable
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from narrowgauge.system.errors import EXIT_FAILED
from narrowgauge.system.processes import in_time
from narrowgauge.trainer.distributed.launch.world import World
from narrowgauge.trainer.distributed.process_group.store import Failure, keep, name_of, store_gone

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
