"""An ordered map over processes.

The caller's thread reads the items and sends each to a process; results are returned in the order of the
items. The number of pending items is bounded, so memory does not depend on their total.

Processes are not forked from the caller, because a fork would break its threads. They come from a fork server
that has imported the package, where the platform has one, and are spawned elsewhere. A script that uses more
than one worker therefore needs `if __name__ == "__main__":`.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from narrowgauge.system.errors import UserError
from narrowgauge.system.processes import depend_on_parent

A = TypeVar("A")
B = TypeVar("B")

_PENDING = 8  # items for each process that are worked on, or whose results wait for an earlier one


def usable_cores() -> int:
    """The number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function: Callable[[A], B], items: Iterable[A], workers: int) -> Iterator[B]:
    """Map items, read as they are needed, to results in several processes, in the order of the items.

    With several workers the function, the items and the results are pickled; with one the caller does the
    work. An error of the function is raised here.
    """
    assert workers >= 1
    if workers == 1:
        yield from map(function, items)
        return
    pending = deque[Future[B]]()
    with ProcessPoolExecutor(workers, _context(), _start_worker) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) == _PENDING * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            # Python 3.11 waits for a process that started meanwhile, and for a reader (cpython#94777).
            for process in pool._processes.values():
                process.kill()
            pool._call_queue._reader.close()  # type: ignore[attr-defined]
            raise UserError(
                f"one of {workers} workers was killed, most likely for lack of memory; use fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["narrowgauge.trainer.data.preparation.encode"])
    return context


def _start_worker() -> None:
    """Set up a worker process."""
    depend_on_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel
