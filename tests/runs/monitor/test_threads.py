"""How many threads a run computes with on a CPU: the cores that are free, and as many when it is resumed."""

import os

import pytest

from narrowgauge.system.operating_system import cores_of_others
from narrowgauge.trainer.runs.monitor import arithmetic
from narrowgauge.trainer.runs.monitor.arithmetic import threads_of

STARTED = {"event": "start", "step": 0}


@pytest.fixture
def cores(monkeypatch):
    """A machine: its cores, those that others use, and what the user set."""

    def set_up(here, others=0.0, asked=None):
        monkeypatch.setattr(arithmetic, "threads_of_torch", lambda: here)
        monkeypatch.setattr(arithmetic, "cores_of_others", lambda: others)
        if asked is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", asked)

    return set_up


#: (what `cores` sets up, the configured number, the lines of the run) -> the number, and words that tell it.
CASES = [
    ((2, 0.0), 0, [], 2, "threads: 2; the last digits depend on it, and --training.threads N pins it"),
    ((2, 1.0), 0, [], 1, "threads: 1 of 2, since other programs use 1.0 cores; the last digits depend on it"),
    ((2, 1.9), 0, [], 1, "threads: 1 of 2"),
    ((8, 0.3), 0, [], 8, "threads: 8;"),
    # the user decides
    ((2, 1.0, "2"), 0, [], 2, "threads: 2; the last digits depend on it, and --training.threads N pins it"),
    ((1, 0.0, "1"), 0, [STARTED | {"threads": 2}], 1, "the run had 2"),
    # the configuration pins it: its digits matter more than its speed
    ((8, 7.0, "4"), 2, [], 2, "threads: 2, as configured"),
    ((8, 7.0, "4"), 2, [STARTED | {"threads": 2}], 2, "threads: 2, as before"),
    ((1, 0.0), 2, [STARTED | {"threads": 3}], 2, "the run had 3"),
    # a resumed run keeps its number, since the order of sums follows from it, and so last digits
    ((8, 7.0), 0, [STARTED | {"threads": 8}, {"step": 1}], 8, "threads: 8, as before"),
    ((8, 7.0), 0, [STARTED | {"threads": 9}], 8, "last digits may differ"),
    ((8, 7.0), 0, [STARTED], 8, ""),  # from before it was recorded
]


@pytest.mark.parametrize(("machine", "pinned", "lines", "expected", "words"), CASES)
def test_threads_are_the_free_cores_or_those_of_before(cores, machine, pinned, lines, expected, words):
    cores(*machine)
    number, said = threads_of(lines, pinned=pinned)
    assert number == expected
    assert words in said


def test_the_cores_of_other_programs_are_counted():
    assert 0 <= cores_of_others() <= os.cpu_count()
