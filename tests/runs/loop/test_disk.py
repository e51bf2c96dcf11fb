"""What becomes of a run when the disk fails: saves at once and in the background, and its records.

That a save that fails or is killed leaves the older checkpoints whole, on one rank and on two, is shown in
checkpoint/store/; with real disks in faults/test_storage.py.
"""

import errno
import io
import os
from pathlib import Path

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.system.json_lines import read_jsonl
from narrowgauge.trainer.checkpoint import SaveError, steps
from narrowgauge.trainer.runs.run_directory import RunWriter
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer
from support.fault_table import case

WAYS = pytest.mark.parametrize("way", [{}, {"checkpoint.asynchronous": True}], ids=["at once", "behind"])


@pytest.fixture
def full(monkeypatch):
    """The steps whose saves find the disk full."""
    steps, rename = set(), os.rename

    def renamed(old, new):
        if Path(new).name in {f"step-{step}" for step in steps}:
            raise OSError(errno.ENOSPC, "No space left on device", str(new))
        rename(old, new)

    monkeypatch.setattr(os, "rename", renamed)
    return steps


@pytest.mark.tier("thorough")
@WAYS
def test_saves_that_fail_are_told_and_three_in_a_row_end_the_run(train, look, tmp_path, full, way):
    """Failures that do not follow each other end nothing."""
    full |= {4, 10, 12, 14}
    said, run = io.StringIO(), look(tmp_path / "run")
    with pytest.raises(SaveError, match="3 saves in a row have failed, and"):
        train("run", way | {"training.steps": 20}, said)
    full.clear()
    assert [event["step"] for event in run.events("save")] == [2, 6, 8]
    assert [event["step"] for event in run.events("save failed")] == [4, 10, 12, 14]
    assert said.getvalue().count("NOT SAVED: step") == 4
    assert run.steps[-1]["step"] == (16 if way else 14), "it is known at the next save"
    assert run.status["status"] == "failed"
    assert steps(run.path / "checkpoints") == [6, 8]
    train("run", way | {"training.steps": 20})
    assert run.trajectory == look(train("other", {"training.steps": 20})).trajectory


@pytest.mark.tier("thorough")
@WAYS
def test_the_last_save_must_succeed(train, look, tmp_path, full, way):
    full.add(6)
    with pytest.raises(SaveError, match="step 6 could not be saved"):
        train("run", way | {"checkpoint.every": 4})
    assert [event["step"] for event in look(tmp_path / "run").events("save failed")][-1] == 6


@pytest.mark.parametrize("changes", [{}, {"recipe.name": "msamp-o2"}, {"model.name": "gpt2-debug"}], ids=str)
def test_the_planned_space_of_a_checkpoint_is_that_of_its_files(tiny, tmp_path, changes):
    """Tied weights count once."""
    sizes = {"model.dim": 128, "model.kv_heads": 2, "recipe.name": "fp32"}
    trainer = Trainer.begin(make_config(tiny(sizes | changes)), torch.device("cpu"))
    space, folder = trainer.plan_save(tmp_path, "me").space, trainer.plan_save(tmp_path, "me").write()
    assert space.inodes == len(os.listdir(folder)) + 1
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size <= space.bytes <= size + space.inodes * 65536


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(train, tmp_path):
    words = r"needs [\d.,]+ TiB and \d+ inodes, for 20000001 more .* and its disk"
    with pytest.raises(UserError, match=words):
        train(changes={"checkpoint.keep": 20_000_000})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_lines_wait_while_they_cannot_be_written_and_are_told_once(tmp_path):
    """/dev/full answers every write with "No space left on device"."""
    said = []
    writer = RunWriter(tmp_path, said.append)
    for file in (writer.metrics, writer.gauges):
        file.symlink_to("/dev/full")
    for step in (1, 2):
        writer.record({"step": step})
        writer.record_gauges([{"step": step, "layer": "a"}])
    writer.sync_metrics()
    (warning,) = said
    assert f"{writer.metrics} cannot be written (No space left on device); training continues" in warning
    for file in (writer.metrics, writer.gauges):
        file.unlink()
    writer.record({"step": 3})
    writer.flush()
    assert [line["step"] for line in read_jsonl(writer.metrics)] == [1, 2, 3]
    assert [line["step"] for line in read_jsonl(writer.gauges)] == [1, 2]


@case("A8", tier="thorough")
def test_steps_are_on_the_disk_before_a_checkpoint_claims_them(train, tmp_path, monkeypatch):
    calls, sync, rename, run = [], os.fsync, os.rename, tmp_path / "run"

    def fsync(descriptor):
        sync(descriptor)
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def renamed(old, new):
        rename(old, new)
        calls.append(str(new))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    train(changes={"training.steps": 2})
    at = calls.index(str(run / "checkpoints" / "step-2"))
    assert {str(run), str(run / "metrics.jsonl")} <= set(calls[:at])
    assert str(run / "checkpoints") in calls[at:], "the new name is synced"


def test_a_directory_in_the_place_of_the_run_is_left_alone(train, monkeypatch, tmp_path, look):
    """As when a network disk is gone: under the old name there may be a directory, and it is another one."""
    out, said, take = tmp_path / "run", io.StringIO(), Trainer.train_step

    def swap_and_step(trainer, *arguments):
        if trainer.step == 3:
            out.rename(tmp_path / "elsewhere")
            out.mkdir()
        return take(trainer, *arguments)

    monkeypatch.setattr(Trainer, "train_step", swap_and_step)
    with pytest.raises(FileNotFoundError, match="run directory is gone, and another one is in its place"):
        train(said=said)
    assert os.listdir(out) == []
    assert "NOT RECORDED" in said.getvalue()
    assert look(tmp_path / "elsewhere").column("step") == [1, 2, 3]
