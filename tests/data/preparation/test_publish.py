"""Killed, crowded, out of room: what is published is whole, and nothing else is left."""

import os
import shutil
import signal
import time

import pytest

from data.reading import contents, full_disk
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import open_corpus, prepare
from support.fault_jobs import alive, descendants
from support.fault_table import case

CHILD = """
import sys, time, warnings
from pathlib import Path
from narrowgauge.trainer.data import prepare

source, directory, stop_at, marker, workers = sys.argv[1:]

def stop(stage, done, total, facts):
    if stage == stop_at and not Path(marker).exists():
        print("here", flush=True)
        while not Path(marker).exists():
            time.sleep(0.01)

if __name__ == "__main__":
    warnings.simplefilter("error")
    print(prepare(source, "bpe-300", Path(directory), stop, workers=int(workers)).digest)
"""


@pytest.fixture
def child(narrowgauge, tmp_path):
    """Start a process that prepares and waits in a stage, until the marker is there; it waits there
    already."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    def start(source, directory, stop_at, marker, workers=1):
        process = narrowgauge.start(source, directory, stop_at, marker, workers, script=script)
        return process.until(lambda: process.out.read_text() == "here\n")

    return start


@case("F4", tier="quick")
@pytest.mark.tier("thorough", keep=(("learn", 1),))
@pytest.mark.parametrize(("stop_at", "workers"), [("read", 1), ("learn", 1), ("encode", 1), ("encode", 2)])
def test_publish_killed_at_any_stage_leaves_nothing_and_can_be_repeated(
    source, tmp_path, stop_at, workers, child
):
    undisturbed = contents(prepare(source, "bpe-300", tmp_path / "undisturbed").directory)
    place = tmp_path / "place" / "out"
    process = child(source, place, stop_at, tmp_path / "never", workers)
    started = descendants(process.pid)
    assert workers == 1 or started
    process.send(signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    assert not place.exists()
    (abandoned,) = place.parent.iterdir()
    assert contents(prepare(source, "bpe-300", place).directory) == undisturbed
    process.until(lambda: not any(map(alive, started)))
    # What was left behind goes with the first build that comes an hour later.
    long_ago = time.time() - 4000
    for path in [*abandoned.iterdir(), abandoned]:
        os.utime(path, (long_ago, long_ago))
    shutil.rmtree(place)
    prepare(source, "bpe-300", place)
    assert os.listdir(place.parent) == ["out"]


@case("F4", tier="quick")
def test_two_at_once_both_end_well(source, tmp_path, child):
    place, go = tmp_path / "place" / "out", tmp_path / "go"
    children = [child(source, place, "encode", go) for _ in range(2)]  # neither has published
    assert len(os.listdir(place.parent)) == 2
    go.touch()
    ended = [process.wait(60) for process in children]
    assert [process.code for process in ended] == [0, 0], ended
    digests = {process.out.splitlines()[-1] for process in ended}
    assert digests == {open_corpus(place).digest}
    assert os.listdir(place.parent) == ["out"]


def test_a_full_disk_is_refused_and_leaves_nothing(source, cache):
    says = r"cannot write the corpus to .*: File too large; name a dir"
    with full_disk(50_000), pytest.raises(UserError, match=says):
        prepare(source, "bytes")
    assert os.listdir(cache) == []
    assert prepare(source, "bytes").manifest.train_documents > 0
