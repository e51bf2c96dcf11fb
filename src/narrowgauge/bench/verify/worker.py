"""Runs checks in a separate process, so that one that crashes or hangs does not affect the others.

A kernel that reads a wrong address breaks its process permanently: torch can use the GPU again only from a
new process. So the process ends after a device error, and the next check starts a new one. On a CPU, kernels
run in Triton's interpreter, which is selected when Triton is imported: the process starts with that variable
set.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from traceback import format_exc

import numpy as np
import torch

from narrowgauge.bench.verify.check import AGREES, DIFFERS, NOT_HERE, SKIPPED, Check, Disagreement, Finding
from narrowgauge.processes import Answering, Ended, Late
from narrowgauge.runs.monitor.hardware import use_device

MOST_S = 300.0  # time limit of one check
ALL_S = 480.0  # on a GPU no check begins later: with the step that is timed, a run takes ten minutes
_START_S = 300.0  # time limit for importing torch and opening the device
_NO_ANSWER = (
    "nothing was compared: repeat it with nothing else running; if it ends so again, report it with this file"
)
_INTERPRETER = "TRITON_INTERPRET"
Checks = Callable[[torch.device], Sequence[Check]]  # at the top level, so that a process can import it


def run_all(
    checks_of: Checks,
    device: torch.device,
    say: Callable[[Finding | Check], None],
    most_s: float = MOST_S,
    all_s: float | None = None,
) -> list[Finding]:
    """Run all checks of a device, one after the other.

    Args:
        checks_of: returns the checks, here and in the process.
        device: the device that they run on.
        say: called with each check that begins, and with each finding.
        most_s: the time limit of a check, in seconds.
        all_s: the seconds after which no check begins; None for `ALL_S` on a GPU, and no limit on a CPU.
    """
    found: list[Finding] = []
    runner, start = _Runner(checks_of, device), time.monotonic()
    if all_s is None:
        all_s = ALL_S if device.type == "cuda" else float("inf")
    try:
        for number, check in enumerate(checks_of(device)):
            say(check)
            if time.monotonic() - start > all_s and not check.lacks:
                late = f"not begun within {all_s:g} seconds"
                found.append(Finding(check.group, check.name, SKIPPED, late))
            else:
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
        finding = Finding(check.group, check.name, DIFFERS, finding, _NO_ANSWER)
    return replace(finding, seconds=round(time.monotonic() - start, 1))


class _Runner:
    """The parent's side of the process; starts a new process if the last one ended."""

    def __init__(self, checks_of: Checks, device: torch.device) -> None:
        self._checks_of, self._device = checks_of, device
        self._process: Answering | None = None

    def finding(self, number: int, most_s: float) -> Finding | str:
        """The finding of a check; a clause if its process ended or had to be killed."""
        if self._process is None:
            with interpreted(self._device):
                self._process = Answering(_checking, self._checks_of, self._device, torch.get_num_threads())
        late = f"its process did not begin within {_START_S:g} seconds"
        try:
            self._process.wait_until_ready(_START_S)
            late = f"it did not end within {most_s:g} seconds"
            finding, is_broken = self._process.ask(number, most_s)
        except Late:
            self.end()
            return late
        except Ended as error:
            self.end()
            return f"its process ended with code {error.code}"
        if is_broken:
            self.end()
        assert isinstance(finding, Finding)
        return finding

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
        self._process = None


@contextmanager
def interpreted(device: torch.device) -> Iterator[None]:
    """On a CPU, set the environment so that a new process interprets its kernels."""
    before = os.environ.get(_INTERPRETER)
    if device.type == "cpu":
        os.environ[_INTERPRETER] = "1"
    try:
        yield
    finally:
        os.environ.pop(_INTERPRETER, None)
        if before is not None:
            os.environ[_INTERPRETER] = before


@contextmanager
def _checking(checks_of: Checks, device: torch.device, threads: int) -> Iterator[Callable[[int], object]]:
    """Open the device in the process; yields a function from the index of a check to its finding."""
    torch.set_num_threads(threads)
    use_device(device)
    checks = checks_of(device)
    with np.errstate(all="ignore"):  # numpy, which the interpreter uses, warns about infinities
        yield lambda number: _run(checks[number], device)


def _run(check: Check, device: torch.device) -> tuple[Finding, bool]:
    """The finding of a check, and whether the device must be reopened."""
    try:
        return Finding(check.group, check.name, AGREES, check.run(device)), False
    except Disagreement as error:
        return Finding(check.group, check.name, DIFFERS, str(error), check.do), False
    except Exception as error:  # compilers, drivers and torch raise anything
        words = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        finding = Finding(check.group, check.name, DIFFERS, words, check.do, traceback=format_exc())
        return finding, device.type != "cpu"
