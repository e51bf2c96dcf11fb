"""Being asked to stop: SIGTERM (a scheduler), SIGINT (Ctrl-C), SIGUSR1 (the time limit is near)."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requests() -> Iterator[list[str]]:
    """A list that gets the name of a signal when one asks the run to stop; a second one stops it at once.

    Signals reach only a process's main thread; a run in another one cannot be asked.
    """
    requests: list[str] = []

    def ask(number: int, frame: FrameType | None) -> None:
        requests.append(signal.Signals(number).name)
        if len(requests) > 1:
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) if in_main else ()
    previous = {n: signal.signal(n, ask) for n in numbers}
    try:
        yield requests
    finally:
        for n, handler in previous.items():
            signal.signal(n, handler)
