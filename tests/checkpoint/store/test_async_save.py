"""Saving during steps: snapshots, one at a time, failures reported to all ranks, nothing half visible."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch

from narrowgauge.trainer.checkpoint import AsyncSaver, newest_valid, plan_save, steps
from narrowgauge.trainer.checkpoint.store.before_save import PoisonedError
from narrowgauge.trainer.checkpoint.store.index import full_tensor
from support.checkpoint_ranks import assert_whole
from support.fault_table import case


def planned(path, step, value):
    """A plan to save one tensor of this value."""
    held = {"model": {"w": [full_tensor(torch.full((1000,), float(value)))]}}
    return partial(plan_save, path, step, held, {}, 2, "run")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.tier("thorough")), 3])
def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path, on_ranks, ranks):
    world = on_ranks(ranks, "in_background", tmp_path, steps=[1, 2, 3])
    assert [said["said"] for said in world.said] == [["begun", "begun", "begun", "closed"]] * ranks
    assert steps(tmp_path) == [2, 3]
    for step in (2, 3):
        assert_whole(tmp_path / f"step-{step}", step)


@case("D4", tier="quick")
def test_a_slow_disk_does_not_hold_the_step_and_a_second_save_waits(tmp_path, on_ranks):
    world = on_ranks(2, "in_background", tmp_path, steps=[1, 2], delay=0.1)
    assert [said["published"] for said in world.said] == [[[], [1]]] * 2  # as each call returned
    assert steps(tmp_path) == [1, 2]


def test_async_save_reports_a_failure_to_all_ranks_at_the_next_call_and_recovers(tmp_path, on_ranks):
    full = (1, 500)  # every save fails, in the writer's thread of rank 1
    world = on_ranks(2, "in_background", tmp_path, steps=[1, 2, 3], full=full)
    assert world.codes == [0, 0]
    for said in world.said:
        first, second, third, end = said["said"]
        assert (first, third) == ("begun", "begun")
        for sentence, step in ((second, 1), (end, 3)):
            assert sentence.startswith(f"SaveError: step {step} could not be saved under ")
            assert "(rank 1: [Errno 27] File too large: " in sentence
    assert os.listdir(tmp_path) == []


@case("A9", tier="quick")
def test_killed_with_a_save_under_way_the_previous_one_is_valid(tmp_path, on_ranks):
    on_ranks(2, "save", tmp_path, steps=[1])
    world = on_ranks(2, "in_background", tmp_path, steps=[2], delay=0.1, kill=True)
    assert world.codes == [-signal.SIGKILL] * 2
    assert newest_valid(tmp_path, "run") == (tmp_path / "step-1", [])
    on_ranks(2, "save", tmp_path, steps=[2])
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_one_process_reports_at_the_next_call_and_once(tmp_path):
    with AsyncSaver() as saver:
        assert saver.wait() is None
        saver.save(planned(tmp_path, 1, torch.nan))
        with pytest.raises(PoisonedError, match="'w' of 'model'"):
            saver.save(planned(tmp_path, 2, 2))
        assert steps(tmp_path) == []
        saver.save(planned(tmp_path, 2, 2))
        assert saver.wait() == tmp_path / "step-2"
    with pytest.raises(PoisonedError), AsyncSaver() as saver:  # leaving the block waits and raises
        saver.save(planned(tmp_path, 3, torch.inf))
    assert steps(tmp_path) == [2]


@pytest.mark.tier("thorough")  # waits for a slow disk
def test_the_end_of_a_process_waits_for_its_save(tmp_path):
    script = (
        "import sys, torch; from functools import partial; from pathlib import Path;"
        "from narrowgauge.trainer.checkpoint import AsyncSaver, plan_save;"
        "from narrowgauge.trainer.checkpoint.store.index import full_tensor;"
        "tensors = {'m': {'w': [full_tensor(torch.ones(4_000_000))]}};"
        "AsyncSaver().save(partial(plan_save, Path(sys.argv[1]), 1, tensors, {}, 2, 'run'))"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    assert newest_valid(tmp_path, "run") == (tmp_path / "step-1", [])
