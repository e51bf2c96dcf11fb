"""The command while it still imports torch: signals are answered, and one process speaks for all."""

import signal
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-X", "importtime", "-m", "narrowgauge"]


@pytest.fixture
def while_importing():
    """Start the command, deliver a signal as soon as torch is being imported; (exit code, output)."""

    def do(*arguments, number):
        with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as p:
            assert p.stderr is not None
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
    start = time.monotonic()
    code, said = while_importing(*line(), "--out", str(tmp_path / "run"), number=number)
    assert (code, said) == (
        75,
        f"narrowgauge: stopped by {number.name} before a step was done; the same line continues\n",
    )
    assert time.monotonic() - start < 25
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.tier("thorough")
def test_ctrl_c_in_the_first_second_shows_no_traceback(while_importing):
    assert while_importing("recipes", number=signal.SIGINT) == (1, "narrowgauge: interrupted\n")


def test_a_mistake_is_told_by_one_process_of_a_job(narrowgauge):
    for rank in (0, 1):
        place = {"TORCHELASTIC_RUN_ID": "x", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        ended = narrowgauge("train", "--model", "gpt3-124", **place)
        assert ended.code == 2
        assert bool(ended.err) == (rank == 0)
