"""Ends a run that hangs, with the stacks of all ranks and the name of the rank that the others wait for.

The main thread of a rank reports its progress to the watchdog: each step, each save. The watchdog is a thread
with a separate connection to the store, so that it works while the main thread is stuck in a collective.
Every half second it

- publishes a heartbeat: a count, and how far the main thread is;
- reads whether some rank has ended the run (`failure.Failure`), and ends this rank as well if its main thread
  cannot, because it waits for a rank that is gone;
- counts the heartbeats since the last progress. After too many it ends the run for all: every rank writes the
  stacks of its threads to RUN/hang/rank-N.txt, and the first one reports which ranks are late. A rank without
  a heartbeat was stopped or killed, or its machine is gone.

Time is counted in heartbeats, not by a clock: a job that its scheduler suspends sends none either, and is not
considered hung when it resumes.
"""

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from narrowgauge.distributed.launch.world import World
from narrowgauge.distributed.process_group.failure import EXIT_FAILED, Failure, store_gone
from narrowgauge.distributed.process_group.rendezvous import name_of

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
        self.world, self.patience_s = world, patience_s
        self.directory: Path | None = None
        self.report_cause: Callable[[str], None] = lambda sentence: None
        self.hang_detected = False
        self.end: Failure | None = None
        self._location, self._progress_count, self._patience = "the start", 0, 1.0
        self._heartbeat_count = self._without_progress = 0
        self._done = threading.Event()
        self._store_client = _StoreClient(store)
        self._thread = threading.Thread(target=self._watch, name="narrowgauge-watchdog", daemon=True)
        self._thread.start()

    def progress(self, place: str, patience: float = 1.0) -> None:
        """Record that the main thread is at `place`, where it may stay `patience` times as long as usual; all
        ranks reach the same places in the same order."""
        self._location, self._patience, self._without_progress = place, patience, 0
        self._progress_count += 1

    def stop(self) -> None:
        """Stop watching: from here, the main thread ends by itself."""
        self._done.set()
        self._thread.join(timeout=5)
        self._store_client.close()

    def ranks_without_heartbeat(self) -> list[int]:
        """The ranks whose heartbeat count does not change; takes two seconds."""
        before = self._heartbeats()
        self._done.wait(_MISSED_HEARTBEATS * HEARTBEAT_S)
        after = self._heartbeats()
        return [r for r in range(self.world.size) if before[r][0] == after[r][0] and r != self.world.rank]

    def _watch(self) -> None:
        pending = self._store_client.ask(self._heartbeat)
        while not self._done.wait(HEARTBEAT_S):
            self._without_progress += 1
            if self.patience_s and self._without_progress * HEARTBEAT_S > self.patience_s * self._patience:
                self._end_hang()
            if not pending.done():  # the store is slow, or the process that keeps it has stopped
                continue
            try:
                end = pending.result()
            except RuntimeError:
                self._leave(store_gone(self.world))
                return
            if end is not None and end.rank != self.world.rank:
                self.end = end
                if end.hang:
                    self._follow_hang()
                self._leave(end)
                return
            pending = self._store_client.ask(self._heartbeat)

    def _heartbeat(self, store: Store) -> Failure | None:
        self._heartbeat_count += 1
        heartbeat = [self._heartbeat_count, self._progress_count, self._location]
        store.set(f"heartbeat/{self.world.rank}", json.dumps(heartbeat))
        return Failure.find(store)

    def _leave(self, end: Failure) -> None:
        """End the process, unless its main thread does so in time."""
        if not self._done.wait(_GRACE_HEARTBEATS * HEARTBEAT_S):
            self._exit(end.as_seen_by_peers() if end.is_reported_by(self.world) else "", end.code)

    def _exit(self, sentence: str, code: int = EXIT_FAILED) -> None:
        if sentence:
            print(f"narrowgauge: {sentence}", file=sys.stderr, flush=True)
        os._exit(code)  # the main thread may be stuck where it never returns

    def _end_hang(self) -> None:
        """End the run after too long without progress, and report which ranks are late."""
        self.hang_detected = True
        self._dump_stacks()
        waited = f"nothing moved for {self.patience_s * self._patience:g} s"
        publish = Failure(self.world.rank, EXIT_FAILED, waited, hang=True).publish
        try:
            first = self._store_client.ask(publish).result(5)
            if first.rank != self.world.rank:
                self._follow_hang()
            sentence = f"{waited}: {self._who_is_late()}"
        except (TimeoutError, RuntimeError):
            sentence = f"{waited}: rank 0 or its launcher does not answer at {self.world.master_addr}"
        if self.directory is not None:
            sentence += f"; the stacks of the ranks are in {self.directory / 'hang'}"
        self.report_cause(sentence)
        self._store_client.ask(lambda store: store.set(_REPORT, sentence))
        self._exit(sentence)

    def _follow_hang(self) -> None:
        """Write the stacks after another rank detected a hang, wait for its report, and end this rank."""
        if not self.hang_detected:
            self.hang_detected = True
            self._dump_stacks()
        beats = 0
        while beats < _GRACE_HEARTBEATS and not self._has_report():
            beats += 1
            threading.Event().wait(HEARTBEAT_S)
        self._exit("")

    def _has_report(self) -> bool:
        """Whether the cause is published; sends a heartbeat, so that this rank is not considered gone."""
        try:
            self._store_client.ask(self._heartbeat)
            return self._store_client.ask(lambda store: store.check([_REPORT])).result(5)
        except (TimeoutError, RuntimeError):
            return True

    def _who_is_late(self) -> str:
        """The ranks without a heartbeat, else those that are behind, else where all of them are."""
        missing = self.ranks_without_heartbeat()
        heartbeats = self._heartbeats()
        furthest = max(count for _, count, _ in heartbeats)
        late = missing or [r for r, (_, count, _) in enumerate(heartbeats) if count < furthest]
        if not late:
            return f"all {self.world.size} ranks are at {self._location}"
        verb = "does not answer" if missing else "did not arrive"
        names = [f"{self._name(r)} {verb}, and was last heard of at {heartbeats[r][2]}" for r in late[:8]]
        return ", ".join(names) + (f", and {len(late) - 8} more" if len(late) > 8 else "")

    def _name(self, rank: int) -> str:
        return self._store_client.ask(lambda store: name_of(store, rank)).result(5)

    def _heartbeats(self) -> list[tuple[int, int, str]]:
        """(heartbeats, progress, place) of every rank; zeros for one without a heartbeat so far."""

        def read(store: Store) -> list[tuple[int, int, str]]:
            keys = [f"heartbeat/{rank}" for rank in range(self.world.size)]
            return [tuple(json.loads(store.get(k))) if store.check([k]) else (0, 0, "no place") for k in keys]

        return self._store_client.ask(read).result(10)

    def _dump_stacks(self) -> None:
        """Write the stacks of all threads of this process to RUN/hang/rank-N.txt or standard error."""
        writer = threading.Thread(target=self._write_stacks, name="narrowgauge-stacks", daemon=True)
        writer.start()
        writer.join(timeout=5)  # the disk itself may hang

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


class _StoreClient:
    """Calls the store in a separate thread, because a store that does not answer blocks its caller."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="narrowgauge-store", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[Store], T]) -> Future[T]:
        """Put a call of the store into the queue."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(question(self._store))
            except Exception as error:
                future.set_exception(error)

        self._questions.put(answer)
        return future

    def _answer(self) -> None:
        while answer := self._questions.get():
            answer()

    def close(self) -> None:
        self._questions.put(None)
        self._thread.join(timeout=1)
