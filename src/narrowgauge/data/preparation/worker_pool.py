"""How is work spread over processes, and how do its results keep their order?

The caller's thread reads the items and hands each to a process that is free. While all are busy, or not yet
started, it does an item itself, so N workers are N - 1 processes and the caller. Results come back in the
order of the items; so many are under way at most that memory does not depend on how many there are.

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

_AHEAD = 2  # items sent for each process: one at work, one at hand
_WAITING = 24  # results that may wait for an earlier one, for each worker


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(make: Callable[[], Callable[[A], B]], items: Iterable[A], workers: int) -> Iterator[B]:
    """What `make()` makes of each item, in the order of the items.

    `make` is called here and once in each further process; it, items and results have to be what can be sent
    to a process. Errors: those of the work; `UserError` where a process was killed.
    """
    assert workers >= 1
    work = make()
    if workers == 1:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(workers - 1, _context(), _begin, (make,)) as pool:
        try:
            yield from _in_order(pool, work, items, workers)
        except BrokenProcessPool:
            raise UserError(
                f"one of {workers} workers was killed, for want of memory most likely; take fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, work: Callable[[A], B], items: Iterable[A], workers: int
) -> Iterator[B]:
    results = deque[Future[B]]()
    sent = list[Future[B]]()
    for item in items:
        sent = [future for future in sent if not future.done()]
        if len(sent) < _AHEAD * (workers - 1):
            results.append(pool.submit(_work, item))
            sent.append(results[-1])
        else:
            results.append(_done_here(work, item))
        while results and (results[0].done() or len(results) > _WAITING * workers):
            yield results.popleft().result()
    while results:
        yield results.popleft().result()


def _done_here(work: Callable[[A], B], item: A) -> Future[B]:
    """What a process would give back: an error too waits until its turn comes."""
    result = Future[B]()
    try:
        result.set_result(work(item))
    except Exception as error:
        result.set_exception(error)
    return result


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
