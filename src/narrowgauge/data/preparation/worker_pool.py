"""An ordered map over processes.

The caller's thread reads the items and sends each to an idle process. While all are busy or still starting,
the caller processes an item itself, so N workers are N - 1 processes and the caller. Results are returned in
the order of the items. The number of pending items is bounded, so memory does not depend on their total.

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

from narrowgauge.errors import UserError
from narrowgauge.processes import depend_on_parent

A = TypeVar("A")
B = TypeVar("B")

_SENT = 2  # items sent to each process: the current one and the next
_PENDING = 24  # results for each worker that may wait for an earlier one


def usable_cores() -> int:
    """The number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(make: Callable[[], Callable[[A], B]], items: Iterable[A], workers: int) -> Iterator[B]:
    """Map items to results in several processes, in the order of the items.

    Args:
        make: Returns the function to map; called once in each process, this one included. `make`, the items
            and the results are pickled.
        items: The arguments of the function.
        workers: Number of processes, including this one.

    Raises:
        UserError: a process was killed.
        Exception: any error of the function.
    """
    assert workers >= 1
    function = make()
    if workers == 1:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers - 1, _context(), _start_worker, (make,)) as pool:
        try:
            yield from _in_order(pool, function, items, workers)
        except BrokenProcessPool:
            raise UserError(
                f"one of {workers} workers was killed, most likely for lack of memory; use fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, function: Callable[[A], B], items: Iterable[A], workers: int
) -> Iterator[B]:
    results = deque[Future[B]]()
    sent = list[Future[B]]()
    for item in items:
        sent = [future for future in sent if not future.done()]
        if len(sent) < _SENT * (workers - 1):
            results.append(pool.submit(_call, item))
            sent.append(results[-1])
        else:
            results.append(_call_locally(function, item))
        while results and (results[0].done() or len(results) > _PENDING * workers):
            yield results.popleft().result()
    while results:
        yield results.popleft().result()


def _call_locally(function: Callable[[A], B], item: A) -> Future[B]:
    """A future as another process would return it, so that an error is raised in the order of the items."""
    result = Future[B]()
    try:
        result.set_result(function(item))
    except Exception as error:
        result.set_exception(error)
    return result


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["narrowgauge.data.preparation.corpus_builder"])
    return context


_function: Callable[[Any], Any]  # of a worker process


def _start_worker(make: Callable[[], Callable[[Any], Any]]) -> None:
    """Set up a worker process."""
    global _function
    depend_on_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run in parallel
    _function = make()


def _call(item: Any) -> Any:
    return _function(item)
