"""Child processes: programs that run in parallel, a program's output, a process that answers requests.

No child outlives this process, however it ends. An answering process and the workers of a pool call
`depend_on_parent`; `narrowgauge` itself, started as a program, calls `signals.die_with_launcher`.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from types import FrameType
from typing import Any, Self, TypeVar

from narrowgauge.system.errors import words_of
from narrowgauge.system.operating_system import stop_signals

T = TypeVar("T")

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


class Worker:
    """The parent's side of a process that answers requests, one at a time.

    The process is spawned, so it shares nothing with this one. It exits when the parent exits, or at `end`.
    """

    def __init__(self, prepare: Prepare, *arguments: object) -> None:
        """Start the process; it calls `prepare(*arguments)`."""
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), depend_on_parent)
        self._pid = self._pool.submit(os.getpid)
        self._prepared = self._pool.submit(_prepare, prepare, arguments)

    def ask(self, request: object) -> Any:
        """The answer to a request.

        Raises:
            RuntimeError: The process was killed, or crashed.
            Exception: What preparing or answering raised in the process, with its traceback there.
        """
        try:
            self._prepared.result()
            return self._pool.submit(_answer, request).result()
        except BrokenProcessPool:
            raise RuntimeError("its process was killed, or crashed") from None

    def end(self, grace_s: float = 0.0) -> None:
        """End the process; it may clean up for `grace_s` seconds."""
        with suppress(Exception):  # it has ended, or is late
            if grace_s:
                self._pool.submit(_clean_up).result(grace_s)
        with suppress(Exception):
            os.kill(self._pid.result(), signal.SIGTERM)
        self._pool.shutdown(cancel_futures=True)


# In a process that answers: what was prepared, and the function that answers.
_PREPARED = ExitStack()
_answers: list[Callable[[Any], object]] = []


def _prepare(prepare: Prepare, arguments: tuple[object, ...]) -> None:
    _answers.append(_PREPARED.enter_context(prepare(*arguments)))


def _answer(request: object) -> object:
    return _answers[0](request)


def _clean_up() -> None:
    _PREPARED.close()
