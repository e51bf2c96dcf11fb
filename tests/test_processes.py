"""A process that answers requests: its answers, its end, and an answer that does not come."""

import os
import signal
import time
from contextlib import contextmanager

import pytest

from narrowgauge.processes import Answering, Ended, Late


@contextmanager
def adding(number):
    def answer(request):
        if request == "end":
            os._exit(9)
        if request == "pid":
            return os.getpid()
        time.sleep(60 if request == "late" else 0)
        return request + number

    yield answer


@contextmanager
def broken():
    os._exit(7)
    yield lambda request: request


@pytest.fixture
def process():
    process = Answering(adding, 2)
    yield process
    process.end()


def test_answers_come_in_the_order_of_the_requests(process):
    assert [process.ask(number) for number in (1, 5)] == [3, 7]


def test_the_end_of_a_process_is_an_error_with_its_exit_code(process):
    with pytest.raises(Ended) as error:
        process.ask("end")
    assert error.value.code == 9
    with pytest.raises(Ended):
        process.ask(1)


def test_an_end_in_the_preparation_is_an_error_with_its_exit_code():
    process = Answering(broken)
    with pytest.raises(Ended) as error:
        process.wait_until_ready()
    assert error.value.code == 7
    process.end()


def test_a_late_answer_is_an_error_and_the_process_can_be_ended(process):
    pid = process.ask("pid")
    with pytest.raises(Late):
        process.ask("late", 0.2)
    process.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ctrl_c_is_left_to_the_parent(process):
    os.kill(process.ask("pid"), signal.SIGINT)
    assert process.ask(1) == 3
