"""How many threads a run computes with on a CPU: the cores that are free, and as many when it is resumed."""

import subprocess
import sys

import pytest

from narrowgauge.runs.monitor import threads
from narrowgauge.runs.monitor.threads import threads_of

STARTED = {"event": "start", "step": 0}


@pytest.fixture
def cores(monkeypatch):
    """A machine: its cores, those that others use, and what the user set."""

    def set_up(here, others=0.0, asked=None):
        monkeypatch.setattr(threads, "threads_of_torch", lambda: here)
        monkeypatch.setattr(threads, "cores_of_others", lambda: others)
        if asked is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", asked)

    return set_up


@pytest.mark.parametrize(
    ("here", "others", "free"),
    [(2, 0.0, 2), (2, 0.4, 2), (2, 1.0, 1), (2, 1.9, 1), (1, 1.0, 1), (16, 3.1, 13), (8, 0.3, 8)],
)
def test_a_new_run_takes_the_free_cores(cores, here, others, free):
    cores(here, others)
    number, words = threads_of([])
    assert number == free
    assert words.startswith(f"threads: {free}")
    assert (f"threads: {free} of {here}" in words) == (free != here)


def test_the_user_decides(cores):
    cores(2, others=1.0, asked="2")
    assert threads_of([]) == (
        2,
        "threads: 2; the last digits depend on it, and --training.threads N pins it",
    )
    cores(1, asked="1")
    number, words = threads_of([STARTED | {"threads": 2}])
    assert number == 1
    assert "the run had 2" in words


def test_the_configuration_pins_the_number(cores):
    cores(8, others=7.0, asked="4")
    assert threads_of([], pinned=2) == (2, "threads: 2, as configured")
    assert threads_of([STARTED | {"threads": 2}], pinned=2) == (2, "threads: 2, as before")
    cores(1)
    assert threads_of([STARTED | {"threads": 2}], pinned=2)[0] == 2, "its digits matter more than its speed"
    number, words = threads_of([STARTED | {"threads": 3}], pinned=2)
    assert number == 2
    assert "the run had 3" in words


def test_the_line_about_fewer_threads_says_what_follows(cores):
    cores(2, others=1.0)
    assert threads_of([])[1] == (
        "threads: 1 of 2, since other programs use 1.0 cores; the last digits depend on it, and "
        "--training.threads N pins it"
    )


def test_a_resumed_run_keeps_its_number(cores):
    """The number decides over the order of sums, so over last digits."""
    cores(8, others=7.0)
    assert threads_of([STARTED | {"threads": 8}, {"step": 1}]) == (8, "threads: 8, as before")
    assert threads_of([STARTED | {"threads": 5}]) == (5, "threads: 5, as before")
    number, words = threads_of([STARTED | {"threads": 9}])
    assert number == 8
    assert "last digits may differ" in words
    assert threads_of([STARTED])[0] == 8  # from before it was recorded


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells what others compute")
def test_another_program_is_seen():
    look = "from narrowgauge.operating_system import cores_of_others as c; import time; time.sleep(1)"
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            found = subprocess.run(
                [sys.executable, "-c", f"{look}; print(c())"], capture_output=True, text=True, check=True
            )
        finally:
            other.kill()
    assert float(found.stdout) > 0.3
