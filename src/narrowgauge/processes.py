"""Child processes: programs that run in parallel, a program's output, a process that answers requests.

No child outlives this process, however it ends. An answering process and the workers of a pool call
`depend_on_parent`; `narrowgauge` itself, started as a program, calls `signals.die_with_launcher`.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from traceback import format_exc
from types import FrameType
from typing import Any, Self, TypeVar

from narrowgauge.errors import words_of
from narrowgauge.operating_system import stop_signals

T = TypeVar("T")
_END_S = 10.0  # for a process that was asked to exit

#: Prepares the process and, as a context manager, yields the function that answers; a module-level name.
Prepare = Callable[..., AbstractContextManager[Callable[[Any], object]]]


class Programs:
    """Programs that run in parallel; the `with` block kills those that still run when it ends."""

    def __init__(self) -> None:
        self._started: list[Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._started:
            program.kill()  # no effect on one that has exited
        for program in self._started:
            program.wait()

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> Popen[bytes]:
        """Start a program; `options` go to `subprocess.Popen`."""
        program = Popen(command, env=environment, **options)
        self._started = [*(one for one in self._started if one.returncode is None), program]
        return program

    @contextmanager
    def forwarding(self, note: Callable[[int], None]) -> Iterator[None]:
        """Within the block, pass each stop signal to `note` and forward it to the programs.

        Ctrl-C is not forwarded: it reaches every process of a terminal, and a second one stops a run at once.
        """

        def forward(number: int, frame: FrameType | None) -> None:
            note(number)
            if number != signal.SIGINT:
                for program in self._started:
                    program.send_signal(number)  # no effect on one that has exited

        with stop_signals(forward):
            yield


@dataclass(frozen=True, slots=True)
class Output:
    """A program's output and exit code; code None if it could not be started or did not finish in time."""

    code: int | None
    out: str = ""
    error: str = ""


def output_of(command: Sequence[str], seconds: float) -> Output:
    """Run a command for at most `seconds`. A process that survives even a kill is left behind."""
    try:
        process = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, errors="replace")
    except OSError as error:
        return Output(None, error=words_of(error))
    try:
        out, words = process.communicate(timeout=seconds)
        return Output(process.returncode, out, words)
    except TimeoutExpired:
        process.kill()  # it may be stuck in the kernel: waited for elsewhere
    threading.Thread(target=process.communicate, daemon=True).start()
    return Output(None, error=f"no answer in {seconds:.0f} s")


def in_time(ask: Callable[[], T], seconds: float, late: T) -> T:
    """The result of `ask`, or `late` if it takes longer than `seconds`; its thread is then left behind."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else late


def depend_on_parent() -> None:
    """Leave Ctrl-C to the parent, and exit with the parent; for `multiprocessing` children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


class Ended(Exception):
    """The process exited before it answered.

    Attributes:
        code: Its exit code, negative if a signal killed it; None if it has not been collected.
        traceback: The traceback of the exception that ended it; "" where it could send none.
    """

    def __init__(self, code: int | None, traceback: str = "") -> None:
        super().__init__(f"the process ended with code {code}")
        self.code, self.traceback = code, traceback


class Answering:
    """The parent's side of a process that answers requests, one at a time.

    The process is spawned, so it shares nothing with this one. It exits when the parent exits or closes its
    end of the pipe.
    """

    def __init__(self, prepare: Prepare, *arguments: object) -> None:
        """Start the process; it calls `prepare(*arguments)`."""
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(prepare, arguments, theirs))
        self._process.start()
        theirs.close()

    def ask(self, request: object) -> Any:
        """The answer to a request.

        Raises:
            Ended: The process exited.
        """
        is_answer, answer = False, ""
        with suppress(OSError):  # the process has exited; its last words may be there
            self._connection.send(request)
        with suppress(EOFError, OSError):
            is_answer, answer = self._connection.recv()
        if is_answer:
            return answer
        self._process.join(_END_S)
        raise Ended(self._process.exitcode, answer)

    def end(self, grace_s: float = 0.0) -> None:
        """End the process if it still runs; it may exit by itself within `grace_s` seconds."""
        self._connection.close()
        self._process.join(grace_s)
        self._process.terminate()
        self._process.join(_END_S)


def _serve(prepare: Prepare, arguments: tuple[object, ...], connection: Connection) -> None:
    """Prepare, then answer requests until the parent closes its end."""
    depend_on_parent()
    try:
        with prepare(*arguments) as answer, suppress(EOFError, OSError):  # the parent has exited
            while True:
                connection.send((True, answer(connection.recv())))
    except Exception:
        with suppress(OSError):
            connection.send((False, format_exc()))
        raise
