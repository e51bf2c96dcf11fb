"""A process that answers the requests of this one, over a pipe.

The process is spawned, so that it shares nothing with this one. It leaves Ctrl-C to its parent, and ends when
the parent's end of the pipe closes: the parent has ended it, or has itself ended in any way.
"""

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

_END_S = 10.0  # for a process that is asked to end

#: Prepares the process and gives, for the length of a `with`, the function that answers; a name of a module.
Prepare = Callable[..., AbstractContextManager[Callable[[Any], object]]]


class Ended(Exception):
    """The process ended before it answered.

    Attributes:
        code: Its exit code, negative if a signal killed it; None if it has not been collected.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the process ended with code {code}")
        self.code = code


class Late(Exception):
    """The process has not answered in time; it still runs."""


class Answering:
    """The parent's side of a process that answers requests, one at a time."""

    def __init__(self, prepare: Prepare, *arguments: object) -> None:
        """Start the process; `prepare(*arguments)` is called there."""
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(prepare, arguments, theirs))
        self._process.start()
        theirs.close()
        self._is_ready = False

    def wait_until_ready(self, most_s: float | None = None) -> None:
        """Wait for the end of the preparation.

        Raises:
            Ended: The process ended.
            Late: It took more than `most_s` seconds; None: any time is fine.
        """
        if not self._is_ready:
            self._receive(most_s)
            self._is_ready = True

    def ask(self, request: object, most_s: float | None = None) -> Any:
        """The answer to a request; waits for the end of the preparation first.

        Raises:
            Ended: The process ended.
            Late: The answer took more than `most_s` seconds; None: any time is fine.
        """
        self.wait_until_ready()
        try:
            self._connection.send(request)
        except OSError:
            raise self._ended() from None
        return self._receive(most_s)

    def end(self) -> None:
        """End the process, if it still runs."""
        self._connection.close()
        self._process.terminate()
        self._process.join(_END_S)

    def _receive(self, most_s: float | None) -> Any:
        try:
            is_late = not self._connection.poll(most_s)
            answer = None if is_late else self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if is_late:
            raise Late
        return answer

    def _ended(self) -> Ended:
        self._process.join(_END_S)
        return Ended(self._process.exitcode)


def _serve(prepare: Prepare, arguments: tuple[object, ...], connection: Connection) -> None:
    """Prepare, then answer requests until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with prepare(*arguments) as answer:
        try:
            connection.send(None)
            while True:
                connection.send(answer(connection.recv()))
        except (EOFError, OSError):  # the parent is gone
            return
