"""Which signals ask a process to stop, and what a terminal leaves behind that closes."""

import os
import signal
import subprocess
import sys

import pytest

from narrowgauge.system.operating_system import STOP_SIGNALS
from narrowgauge.system.signals import stop_requests

ASKING = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"}


@pytest.mark.parametrize("name", sorted(ASKING))
def test_a_request_is_recorded_and_the_former_handler_comes_back(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with stop_requests() as requests:
        os.kill(os.getpid(), number)
        assert requests == [name]
        assert requests.number == number
    assert signal.getsignal(number) == before
    assert {signal.Signals(n).name for n in STOP_SIGNALS} == ASKING


def test_a_hang_up_that_nohup_ignores_stays_ignored(request):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    with stop_requests() as requests:
        os.kill(os.getpid(), signal.SIGHUP)
        assert requests == []
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


# The outer process is ssh: it opens a terminal, starts the inner one there and closes the terminal.
INNER = """
import signal, sys, time
from narrowgauge.system.signals import stop_requests
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
with stop_requests() as requests:
    print("ready", flush=True)
    while not requests:
        time.sleep(0.001)
    print("saved", flush=True)
    print("stopped", file=sys.stderr, flush=True)
    sys.exit(75 if requests == ["SIGHUP"] else 3)
"""
OUTER = f"""
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-c", {INNER!r}])
while b"ready" not in os.read(terminal, 4096):
    pass
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_what_is_said_to_a_terminal_that_is_gone_fails_nothing():
    ended = subprocess.run([sys.executable, "-c", OUTER], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (75, "")
