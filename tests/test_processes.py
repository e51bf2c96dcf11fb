"""Programs side by side; a process that answers requests: its answers and its end."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from narrowgauge.system.processes import Programs, Worker
from support.fault_jobs import alive


@contextmanager
def adding(number):
    def answer(request):
        if request == "end":
            os._exit(9)
        if request == "pid":
            return os.getpid()
        time.sleep(60 if request == "busy" else 0)
        return number + request

    yield answer


@contextmanager
def broken():
    raise LookupError("nothing to prepare")
    yield


@pytest.fixture
def process():
    process = Worker(adding, 2)
    yield process
    process.end()


def test_answers_come_in_order_and_ctrl_c_is_left_to_the_parent(process):
    assert [process.ask(number) for number in (1, 5)] == [3, 7]
    os.kill(process.ask("pid"), signal.SIGINT)
    assert process.ask(1) == 3


def test_the_end_of_a_process_is_an_error_and_so_is_what_it_raises(process):
    with pytest.raises(TypeError, match="unsupported operand"):
        process.ask("words")
    assert process.ask(1) == 3
    for _ in range(2):
        with pytest.raises(RuntimeError, match="its process was killed, or crashed"):
            process.ask("end")
    in_the_preparation = Worker(broken)
    with pytest.raises(LookupError, match="nothing to prepare"):
        in_the_preparation.ask(1)
    in_the_preparation.end()


def test_the_process_can_be_ended(process):
    pid = process.ask("pid")
    process.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_programs_end_with_the_block():
    with Programs() as programs:
        started = [programs.start(SLEEPS, os.environ) for _ in range(2)]
    assert [program.returncode for program in started] == [-signal.SIGKILL] * 2


PARENT = """
import sys, time
from narrowgauge.system.processes import Worker
from test_processes import adding
if __name__ == "__main__":
    process = Worker(adding, 2)
    print(process.ask("pid"), flush=True)
    process.ask("busy")
"""


def test_a_process_that_answers_ends_with_its_parent_however_busy_it_is(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], env=environment, stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and alive(pid):
        time.sleep(0.05)
    assert not alive(pid)
