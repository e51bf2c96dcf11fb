"""Programs in Python that begin in a process which has imported torch, and end as Python ends them.

`Popen` stands in for subprocess's while a test asks for it: if the command starts other processes (a
comparison its runs, torchrun its ranks), they are forked instead of started again, which saves the four
seconds of importing torch and nothing else. They are separate processes, children of their starter,
with the environment, folder, streams and session that they were given, and with no file, signal handler or
exit function of their parent.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

_kept: list[TextIO] = []  # streams of the parent: what they hold unwritten is the parent's to write
_is_forking = False


@dataclass(frozen=True)
class Program:
    """A file to run, or the command `narrowgauge`, and its arguments."""

    script: str | None
    arguments: Sequence[str]
    is_unbuffered: bool = False

    def run(self) -> None:
        """Be it, to the end of the process."""
        sys.argv = [self.script or "narrowgauge", *self.arguments]
        if self.script is None:
            to_the_end(lambda: runpy.run_module("narrowgauge", run_name="__main__", alter_sys=True))
        script = self.script
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        to_the_end(lambda: runpy.run_path(script, run_name="__main__"))


def program_of(command: object) -> Program | None:
    """What `python -m narrowgauge ...` or `python FILE ...` runs; None for any other command."""
    if not isinstance(command, (list, tuple)) or not command or command[0] != sys.executable:
        return None
    words = [str(word) for word in command[1:]]
    words = words[1:] if words[:1] == ["-u"] else words
    at_once = "-u" in command[1:2]
    if words[:2] == ["-m", "narrowgauge"]:
        return Program(None, words[2:], at_once)
    return Program(words[0], words[1:], at_once) if words and words[0].endswith(".py") else None


def to_the_end(program: Callable[[], object]) -> None:
    """Run a program and end the process as Python does: its error printed, threads, exit functions, streams,
    code."""
    code: object = 0
    try:
        program()
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:  # a signal while it waits for threads
        traceback.print_exc()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def begin_anew(program: Program, environment: Mapping[str, str]) -> None:
    """In a child that was forked: give back what exec would have taken, and be the program."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:  # not closed: who still knows the number must not close another file by it
            os.dup2(nowhere, int(name))
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number == signal.SIGHUP:  # which nohup ignores
            plain = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, plain)
    atexit._clear()
    os.environ.clear()
    os.environ.update(environment)
    _kept.extend((sys.stdout, sys.stderr))
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    at_once = program.is_unbuffered or bool(environment.get("PYTHONUNBUFFERED"))
    for number, stream in ((1, "stdout"), (2, "stderr")):
        file = os.fdopen(number, "w", closefd=False, errors="backslashreplace" if number == 2 else None)
        file.reconfigure(line_buffering=number == 2, write_through=at_once)
        setattr(sys, stream, file)
        setattr(sys, f"__{stream}__", file)
    program.run()


class Popen(subprocess.Popen):
    """subprocess's, which forks for programs in Python inside `forks_instead`."""

    def __init__(self, args: Any, *more: Any, **how: Any) -> None:
        program = program_of(args) if _is_forking else None
        if program is not None:
            environment = dict(os.environ if how.get("env") is None else how["env"])
            how["preexec_fn"] = lambda: begin_anew(program, environment)
        super().__init__(args, *more, **how)


def forks_instead(told: bool) -> None:
    """Whether this process, from now on, forks for the programs in Python that it starts."""
    global _is_forking
    _is_forking = told


subprocess.Popen = Popen  # type: ignore[misc]  before anything imports it by its name
