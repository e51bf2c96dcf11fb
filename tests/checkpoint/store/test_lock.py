"""One process holds a run: a second one learns which, and a dead process holds nothing."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import is_abandoned, lock_run
from support.fault_table import case

HOLDS = """
import sys, time
from pathlib import Path
from narrowgauge.trainer.checkpoint import lock_run
with lock_run(Path(sys.argv[1])):
    Path(sys.argv[2]).touch()
    time.sleep(60)
"""


@case("A5", "G7", tier="quick")
def test_a_second_process_is_told_who_holds_the_run_and_kill_9_frees_it(tmp_path, narrowgauge):
    run, ready, script = (tmp_path / name for name in ("run", "ready", "holds.py"))
    script.write_text(HOLDS)
    process = narrowgauge.start(run, ready, script=script).until(ready.exists)
    who = f"process {process.pid} on host {socket.gethostname()}"
    with pytest.raises(UserError, match=who), lock_run(run):
        pass
    process.send(signal.SIGKILL)
    process.wait()
    assert f"process {process.pid}" in (run / ".lock").read_text()  # the stale file is there, does not block
    with lock_run(run):
        assert (run / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_the_lock_is_exclusive_within_a_process_and_ends_with_the_block(tmp_path):
    with lock_run(tmp_path), pytest.raises(UserError, match="is in use by process"), lock_run(tmp_path):
        pass
    with pytest.raises(RuntimeError, match="inside"), lock_run(tmp_path):
        raise RuntimeError("inside")
    with lock_run(tmp_path):
        pass


def test_a_directory_that_cannot_be_locked_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    for name, words in (
        ("file", "is a file, but a run needs a directory"),
        ("run", "cannot be locked .*writable"),
    ):
        with pytest.raises(UserError, match=words), lock_run(tmp_path / name):
            pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_zombie_that_nobody_waited_for_holds_no_run(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (tmp_path / ".lock").write_text(f"process {child.pid} on host {socket.gethostname()}\n")
    try:
        assert not is_abandoned(tmp_path)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
        assert os.path.exists(f"/proc/{child.pid}")
        assert is_abandoned(tmp_path)
    finally:
        child.communicate()
