"""A process in which checks run, so that one that kills it, or never ends, takes no other with it.

A kernel that reads a wrong address breaks the process for good: torch can use that GPU only from a new one.
So after an error of the device the process ends, and the next check begins in another. On a CPU, kernels run
in Triton's interpreter, which Triton asks for when it is imported: the process starts under that variable.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import torch

from narrowgauge.bench.verify.check import AGREES, DIFFERS, NOT_HERE, Check, Disagreement, Finding
from narrowgauge.runs.monitor.hardware import use_device

MOST_S = 300.0  # of one check
_START_S = 300.0  # of a process, which imports torch and opens the device
_INTERPRETER = "TRITON_INTERPRET"
Checks = Callable[[torch.device], Sequence[Check]]  # of the top level of a module, so that a process finds it


def run_all(
    checks_of: Checks, device: torch.device, say: Callable[[Finding | Check], None], most_s: float = MOST_S
) -> list[Finding]:
    """Run all checks of a device, one after the other.

    Args:
        checks_of: gives the checks, here and in the process.
        device: where they compute.
        say: is told of each check that begins, and of each finding.
        most_s: the seconds of a check, after which it counts as failed.
    """
    found: list[Finding] = []
    runner = _Runner(checks_of, device)
    try:
        for number, check in enumerate(checks_of(device)):
            say(check)
            found.append(_finding(check, runner, number, most_s))
            say(found[-1])
    finally:
        runner.end()
    return found


def _finding(check: Check, runner: "_Runner", number: int, most_s: float) -> Finding:
    if check.lacks:
        return Finding(check.group, check.name, NOT_HERE, check.lacks)
    start = time.monotonic()
    finding = runner.finding(number, most_s)
    if isinstance(finding, str):
        finding = Finding(check.group, check.name, DIFFERS, finding, check.do)
    return replace(finding, seconds=round(time.monotonic() - start, 1))


class _Runner:
    """The parent's side of the process; a new one starts where the last has ended."""

    def __init__(self, checks_of: Checks, device: torch.device) -> None:
        self._start: Callable[[], tuple[BaseProcess, Connection]] = lambda: _started(checks_of, device)
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._is_ready = False

    def finding(self, number: int, most_s: float) -> Finding | str:
        """What came of a check; a clause if its process ended, or had to be ended."""
        if self._process is None or self._connection is None:
            self._process, self._connection = self._start()
        try:
            if not self._is_ready and not self._connection.poll(_START_S):
                self.end()
                return f"its process did not begin within {_START_S:g} seconds"
            if not self._is_ready:
                self._is_ready = self._connection.recv()
            self._connection.send(number)
            if not self._connection.poll(most_s):
                self.end()
                return f"it did not end within {most_s:g} seconds"
            finding, is_broken = self._connection.recv()
        except (EOFError, OSError):
            process = self._process
            process.join(10)
            self.end()
            return f"its process ended with code {process.exitcode}"
        if is_broken:
            self.end()
        assert isinstance(finding, Finding)
        return finding

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.terminate()
            self._process.join(10)
        self._process = self._connection = None
        self._is_ready = False


def _started(checks_of: Checks, device: torch.device) -> tuple[BaseProcess, Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(checks_of, device, torch.get_num_threads(), theirs))
    with interpreted(device):
        process.start()
    theirs.close()
    return process, ours


@contextmanager
def interpreted(device: torch.device) -> Iterator[None]:
    """The environment of a process whose kernels are interpreted, if they are to run on a CPU."""
    before = os.environ.get(_INTERPRETER)
    if device.type == "cpu":
        os.environ[_INTERPRETER] = "1"
    try:
        yield
    finally:
        os.environ.pop(_INTERPRETER, None)
        if before is not None:
            os.environ[_INTERPRETER] = before


def _serve(checks_of: Checks, device: torch.device, threads: int, connection: Connection) -> None:
    """Answer the numbers of checks with findings until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which closes the connection
    torch.set_num_threads(threads)
    use_device(device)
    checks = checks_of(device)
    connection.send(True)
    while True:
        try:
            check = checks[connection.recv()]
            with np.errstate(all="ignore"):  # the interpreter computes with numpy, which warns of infinities
                connection.send(_run(check, device))
        except (EOFError, OSError):  # the parent is gone
            return


def _run(check: Check, device: torch.device) -> tuple[Finding, bool]:
    """What came of a check, and whether the device has to be opened anew."""
    try:
        return Finding(check.group, check.name, AGREES, check.run(device)), False
    except Disagreement as error:
        return Finding(check.group, check.name, DIFFERS, str(error), check.do), False
    except Exception as error:  # whatever a compiler, a driver or torch raises
        words = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return Finding(check.group, check.name, DIFFERS, words, check.do), device.type != "cpu"
