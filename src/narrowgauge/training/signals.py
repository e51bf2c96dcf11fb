"""Being asked to stop: SIGTERM (a scheduler), SIGINT (Ctrl-C), SIGUSR1 (the time limit is near).

A second Ctrl-C, or another signal than the first, stops the run at once. The first one again does not: a
scheduler that tells every process of a job tells a run of `compare` twice, directly and through its parent.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requests() -> Iterator[list[str]]:
    """A list that gets the name of a signal when one asks the run to stop.

    Signals reach only a process's main thread; a run in another one cannot be asked.
    """
    requests: list[str] = []

    def ask(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if requests and (number == signal.SIGINT or name not in requests):
            raise KeyboardInterrupt
        requests.append(name)

    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) if in_main else ()
    previous = {n: signal.signal(n, ask) for n in numbers}
    try:
        yield requests
    finally:
        for n, handler in previous.items():
            signal.signal(n, handler)
