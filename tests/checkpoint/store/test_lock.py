import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from narrowgauge.checkpoint import is_abandoned, lock_run
from narrowgauge.errors import UserError


def _hold(in_process, directory, ready):
    holder = in_process("lock", directory, ready=str(ready), wait=False)
    deadline = time.monotonic() + 10
    while not ready.exists():
        assert time.monotonic() < deadline, "the lock was never taken"
        time.sleep(0.01)
    return holder


def test_a_second_process_is_told_who_holds_the_run_and_kill_9_frees_it(tmp_path, in_process):
    run = tmp_path / "run"
    holder = _hold(in_process, run, tmp_path / "ready")
    try:
        with (
            pytest.raises(UserError, match=f"process {holder.pid} on host {socket.gethostname()}"),
            lock_run(run),
        ):
            pass
    finally:
        os.kill(holder.pid, signal.SIGKILL)
    assert (
        f"process {holder.pid}" in (run / ".lock").read_text()
    )  # the stale file is there, and does not block
    deadline = time.monotonic() + 10
    while True:
        try:
            with lock_run(run):
                assert (run / ".lock").read_text().startswith(f"process {os.getpid()} on ")
            break
        except UserError:  # the kernel has not buried the holder yet
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_lock_is_exclusive_within_a_process_and_ends_with_the_block(tmp_path):
    with lock_run(tmp_path), pytest.raises(UserError, match="is in use by process"), lock_run(tmp_path):
        pass
    with pytest.raises(RuntimeError, match="inside"), lock_run(tmp_path):
        raise RuntimeError("inside")
    with lock_run(tmp_path):
        pass


def test_a_directory_that_cannot_be_locked_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"is a file, but a run needs a directory; give another name"),
        lock_run(tmp_path / "file"),
    ):
        pass
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"cannot be locked .*give a writable"), lock_run(tmp_path / "run"):
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
