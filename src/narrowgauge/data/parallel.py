"""How is work spread over processes, and how do its results keep their order?

The caller's thread reads the items and hands each to whichever process is free; results come back in the
order of the items. No more than two items a process are under way, so memory does not depend on how many
there are.

Processes are not forked from this one, whose threads a fork would break: they come from a server that has
imported what they need once, where the platform has such a server, and start afresh where not. So a script
that calls this with more than one worker keeps its own work behind `if __name__ == "__main__":`.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from narrowgauge.errors import UserError

A = TypeVar("A")
B = TypeVar("B")

_AHEAD = 2  # items under way for each process: one at work, one at hand


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(make: Callable[[], Callable[[A], B]], items: Iterable[A], workers: int) -> Iterator[B]:
    """What `make()` makes of each item, in the order of the items.

    `make` is called once in each of `workers` processes, or here if there is to be one only; it, items and
    results have to be what can be sent to a process. Errors: those of the work; `UserError` where a process
    was killed.
    """
    assert workers >= 1
    if workers == 1:
        yield from map(make(), items)
        return
    under_way = deque[Future[B]]()
    with ProcessPoolExecutor(workers, _context(), _begin, (make,)) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(_work, item))
                if len(under_way) > _AHEAD * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                f"one of {workers} worker processes was killed, for want of memory most likely; take fewer "
                "--workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["narrowgauge.data"])
    return context


_the_work: Callable[[Any], Any]


def _begin(make: Callable[[], Callable[[Any], Any]]) -> None:
    """What a process does once: it leaves Ctrl-C to its parent, and does not outlive it."""
    global _the_work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _the_work = make()


def _work(item: Any) -> Any:
    return _the_work(item)


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
