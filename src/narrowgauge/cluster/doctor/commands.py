"""Asks a program, or a server, for its answer and never waits long: what is broken can hang for ever."""

import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """Output of a program, and its exit code; None: it could not be started, or did not end in time."""

    code: int | None
    out: str = ""
    error: str = ""


def answer_of(command: Sequence[str], seconds: float) -> Answer:
    """Run a command for at most `seconds`. One that not even a kill ends is left behind."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
    except OSError as error:
        return Answer(None, error=words_of(error))
    try:
        out, said = process.communicate(timeout=seconds)
        return Answer(process.returncode, out, said)
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        process.communicate(timeout=1)
    except subprocess.TimeoutExpired:  # stuck in the kernel
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
    return Answer(None, error=f"no answer in {seconds:.0f} s")


def in_time(ask: Callable[[], T], seconds: float, late: T) -> T:
    """The result of `ask`, or `late` if that takes more than `seconds`; its thread is then left behind."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else late


def words_of(error: Exception) -> str:
    """The system's name for an error; never more, for the rest may quote what was asked."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip(" .")
