"""A run that waits for ever is ended, with the stacks of all ranks and the name of the one it waited for.

The main thread of a rank tells its watchdog where it is (`at`): each step, each save. The watchdog is a
thread with a connection of its own to the store, so that it works while the main thread is stuck in a
collective. Every half second, a beat, it

- publishes its beat, and where the main thread is;
- looks whether some rank has ended the run (`ending.Failure`), and if this rank cannot, because it waits for
    one
  that is gone, ends it too;
- counts the beats since the main thread came somewhere. After too many it ends the run for all: every rank
  writes the stacks of its threads to RUN/hang/rank-N.txt, and the first one says who did not arrive. A rank
  whose own beat has stopped is silent: its process was stopped or killed, or its machine is gone.

Time is counted in beats, not by a clock: a job that its scheduler suspends does not beat either, and has not
been hanging when it goes on.
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

BEAT_S = 0.5
_SILENT_BEATS = 5  # a rank that beats less than once in so many of ours is silent
_GRACE_BEATS = 20  # what a main thread gets to end by itself
_REPORT = "report"

T = TypeVar("T")


class Watchdog:
    """Watches the main thread of this rank, and what the others say; `patience_s` = 0 never calls it a hang.

    `directory` gets the stacks, and `tell` the cause, on the rank that found it; both are set when the run
    directory is this run's.
    """

    def __init__(self, world: World, store: Store, patience_s: float) -> None:
        self.world, self.patience_s = world, patience_s
        self.directory: Path | None = None
        self.tell: Callable[[str], None] = lambda sentence: None
        self.found_hang = False
        self.end: Failure | None = None  # what another rank has told
        self._place, self._arrivals, self._patience = "the start", 0, 1.0
        self._beats = self._quiet = 0
        self._done = threading.Event()
        self._wire = _StoreClient(store)
        self._thread = threading.Thread(target=self._watch, name="narrowgauge-watchdog", daemon=True)
        self._thread.start()

    def at(self, place: str, patience: float = 1.0) -> None:
        """The main thread is at `place`, and may stay `patience` times as long as usual; all ranks come to
        the same places in the same order."""
        self._place, self._patience, self._quiet = place, patience, 0
        self._arrivals += 1

    def stop(self) -> None:
        """The main thread ends by itself from here."""
        self._done.set()
        self._thread.join(timeout=5)
        self._wire.close()

    def silent_ranks(self) -> list[int]:
        """Those whose beat stands still; takes two seconds."""
        before = self._pulses()
        self._done.wait(_SILENT_BEATS * BEAT_S)
        after = self._pulses()
        return [r for r in range(self.world.size) if before[r][0] == after[r][0] and r != self.world.rank]

    def _watch(self) -> None:
        beating = self._wire.ask(self._beat)
        while not self._done.wait(BEAT_S):
            self._quiet += 1
            if self.patience_s and self._quiet * BEAT_S > self.patience_s * self._patience:
                self._end_hang()
            if not beating.done():  # the store is slow, or the process that keeps it has stopped
                continue
            try:
                end = beating.result()
            except RuntimeError:
                self._leave(store_gone(self.world))
                return
            if end is not None and end.rank != self.world.rank:
                self.end = end
                if end.hang:
                    self._follow_hang()
                self._leave(end)
                return
            beating = self._wire.ask(self._beat)

    def _beat(self, store: Store) -> Failure | None:
        self._beats += 1
        pulse = [self._beats, self._arrivals, self._place]
        store.set(f"pulse/{self.world.rank}", json.dumps(pulse))
        return Failure.find(store)

    def _leave(self, end: Failure) -> None:
        """End the process, unless its main thread does so in time."""
        if not self._done.wait(_GRACE_BEATS * BEAT_S):
            self._exit(end.as_seen_by_peers() if end.is_reported_by(self.world) else "", end.code)

    def _exit(self, sentence: str, code: int = EXIT_FAILED) -> None:
        if sentence:
            print(f"narrowgauge: {sentence}", file=sys.stderr, flush=True)
        os._exit(code)  # the main thread may be in a place from which it never comes back

    def _end_hang(self) -> None:
        """The main thread has been at one place for too long: end the run, and say who it waits for."""
        self.found_hang = True
        self._dump_stacks()
        waited = f"nothing moved for {self.patience_s * self._patience:g} s"
        publish = Failure(self.world.rank, EXIT_FAILED, waited, hang=True).publish
        try:
            first = self._wire.ask(publish).result(5)
            if first.rank != self.world.rank:
                self._follow_hang()
            sentence = f"{waited}: {self._who_is_late()}"
        except (TimeoutError, RuntimeError):
            sentence = f"{waited}: rank 0 or its launcher does not answer at {self.world.master_addr}"
        if self.directory is not None:
            sentence += f"; the stacks of the ranks are in {self.directory / 'hang'}"
        self.tell(sentence)
        self._wire.ask(lambda store: store.set(_REPORT, sentence))
        self._exit(sentence)

    def _follow_hang(self) -> None:
        """Another rank has found the hang: leave the stacks, and let that one speak first."""
        if not self.found_hang:
            self.found_hang = True
            self._dump_stacks()
        beats = 0
        while beats < _GRACE_BEATS and not self._has_report():
            beats += 1
            threading.Event().wait(BEAT_S)
        self._exit("")

    def _has_report(self) -> bool:
        """Whether the cause is told; goes on beating, so that this rank is not found silent."""
        try:
            self._wire.ask(self._beat)
            return self._wire.ask(lambda store: store.check([_REPORT])).result(5)
        except (TimeoutError, RuntimeError):
            return True

    def _who_is_late(self) -> str:
        """The ranks that do not answer, else those that are behind, else where all of them are."""
        silent = self.silent_ranks()
        pulses = self._pulses()
        furthest = max(arrivals for _, arrivals, _ in pulses)
        late = silent or [r for r, (_, arrivals, _) in enumerate(pulses) if arrivals < furthest]
        if not late:
            return f"all {self.world.size} ranks are at {self._place}"
        verb = "does not answer" if silent else "did not arrive"
        names = [f"{self._name(r)} {verb}, and was last heard of at {pulses[r][2]}" for r in late[:8]]
        return ", ".join(names) + (f", and {len(late) - 8} more" if len(late) > 8 else "")

    def _name(self, rank: int) -> str:
        return self._wire.ask(lambda store: name_of(store, rank)).result(5)

    def _pulses(self) -> list[tuple[int, int, str]]:
        """Beat, arrivals and place of every rank; zeros for one that has never beaten."""

        def read(store: Store) -> list[tuple[int, int, str]]:
            keys = [f"pulse/{rank}" for rank in range(self.world.size)]
            return [tuple(json.loads(store.get(k))) if store.check([k]) else (0, 0, "no place") for k in keys]

        return self._wire.ask(read).result(10)

    def _dump_stacks(self) -> None:
        """The stacks of all threads of this process, to RUN/hang/rank-N.txt or standard error."""
        writer = threading.Thread(target=self._write_stacks, name="narrowgauge-stacks", daemon=True)
        writer.start()
        writer.join(timeout=5)  # it may be the disk that hangs

    def _write_stacks(self) -> None:
        place = f"rank {self.world.rank}, process {os.getpid()}, at {self._place}, {datetime.now():%F %T}"
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
    """Asks the store in a thread of its own, because a store that does not answer holds who asks it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._questions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="narrowgauge-wire", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[Store], T]) -> Future[T]:
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
