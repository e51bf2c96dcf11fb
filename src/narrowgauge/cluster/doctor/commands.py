"""Runs another program for its answer, and never waits long: a broken driver can hold its tools for ever."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said, and its exit code; None: it could not be started, or did not end in time."""

    code: int | None
    out: str = ""
    error: str = ""


def answer_of(command: Sequence[str], seconds: float) -> Answer:
    """Run a command for at most `seconds`. One that not even a kill ends is left behind."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return Answer(None, error=error.strerror or str(error))
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
