"""The command while it still imports torch: signals are answered, and one process speaks for all."""

import signal
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-X", "importtime", "-m", "narrowgauge"]


@pytest.fixture
def while_importing():
    """Start the command, deliver a signal as soon as torch is being imported; (exit code, output)."""

    def do(*arguments, number):
        with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as p:
            for line in p.stderr:  # one for each module that has been imported
                if line.rstrip().endswith(" torch.types"):
                    break
            p.send_signal(number)
            said = [line for line in p.stderr if not line.startswith("import time:")]
        return p.returncode, "".join(said)

    return do


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda n: n.name)
def test_a_run_that_is_asked_in_its_first_second_ends_with_75(while_importing, line, tmp_path, number):
    ended = while_importing(*line(), "--out", str(tmp_path / "run"), number=number)
    said = f"narrowgauge: stopped by {number.name} before a step was done; rerun the same command to resume\n"
    assert ended == (75, said)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.tier("thorough")
def test_ctrl_c_in_the_first_second_shows_no_traceback(while_importing):
    assert while_importing("recipes", number=signal.SIGINT) == (1, "narrowgauge: interrupted\n")


def test_a_mistake_is_told_by_one_process_of_a_job(command):
    for rank in ("0", "1"):
        place = {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
        ended = command("train", "--model", "gpt3-124", **place)
        assert (ended.code, bool(ended.err)) == (2, rank == "0")
