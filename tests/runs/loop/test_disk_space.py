"""The disk: room for what will be written, and what becomes of a run when the disk goes wrong under it."""

import io
import os
import shutil
import signal
import subprocess

import pytest
import torch
from rich.console import Console

from narrowgauge.checkpoint import free_space, steps
from narrowgauge.errors import UserError
from narrowgauge.json_lines import read_jsonl
from narrowgauge.runs import run
from narrowgauge.training import make_config
from narrowgauge.training.step.trainer import Trainer

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path):
    """`small_disk(size, inodes)`: a separate file system, if this user may mount one."""
    mounted = []

    def mount(size, inodes):
        path = tmp_path / "disk"
        path.mkdir()
        options = f"size={size},nr_inodes={inodes}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting needs rights that this user does not have")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def at_step(monkeypatch):
    """Runs that begin from now on call `actions[n]()` in the middle of step n."""
    begin = Trainer.begin.__func__

    def do(actions):
        left = dict(actions)

        def begin_and_watch(cls, config, device, mesh=None):
            trainer = begin(cls, config, device, mesh)

            def hook(gradient):
                left.pop(trainer.step + 1, lambda: None)()

            trainer.model.head.weight.register_hook(hook)
            return trainer

        monkeypatch.setattr(Trainer, "begin", classmethod(begin_and_watch))

    return do


@pytest.mark.tier("thorough")  # checkpoint/store/ shows it without a run
def test_the_planned_space_of_a_checkpoint_is_that_of_its_files(train, tiny, tmp_path):
    for name in ("fp8", "msamp-o2"):
        path = train(name, {"recipe.name": name, "model.dim": 128, "training.steps": 2})
        folder = path / "checkpoints" / "step-2"
        trainer = Trainer.begin(
            make_config(tiny({"recipe.name": name, "model.dim": 128})).plan, torch.device("cpu")
        )
        space = trainer.plan_save(tmp_path, "me").space
        assert space.inodes == len(os.listdir(folder)) + 1
        size = sum(file.stat().st_size for file in folder.iterdir())
        assert size <= space.bytes <= size + space.inodes * 65536


def test_tied_weights_count_once(tiny, tmp_path):
    config = make_config(tiny({"model.name": "gpt2-debug", "model.kv_heads": 2, "recipe.name": "fp32"}))
    trainer = Trainer.begin(config.plan, torch.device("cpu"))
    parameters = sum(p.nbytes for p in trainer.model.parameters())
    of_steps = 4 * len(list(trainer.model.parameters()))
    space = trainer.plan_save(tmp_path, "me").space
    files = space.inodes - 1  # and the directory
    assert space.bytes - files * 65536 == 3 * parameters + of_steps


@pytest.mark.tier("thorough")
def test_a_disk_that_is_too_small_is_refused_before_the_first_step(train, tmp_path):
    with pytest.raises(
        UserError, match=r"needs [\d.,]+ TiB and \d+ inodes, for 20000001 more .* and its disk"
    ):
        train(changes={"checkpoint.keep": 20_000_000})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    train(changes={"checkpoint.keep": 2})


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("size", "inodes"), [("1m", 1000), ("100m", 12)], ids=["bytes", "inodes"])
def test_a_real_disk_that_is_too_small(narrowgauge, line, small_disk, size, inodes):
    disk = small_disk(size, inodes)
    ended = narrowgauge(*line(), "--out", disk / "run")
    assert ended.code == 2
    (sentence,) = ended.err.splitlines()
    assert "3 more checkpoints" in sentence
    assert "lower checkpoint.keep" in sentence
    assert "another disk with --out" in sentence
    assert not (disk / "run" / "checkpoints").exists()


@pytest.mark.tier("thorough")
def test_a_save_without_room_is_told_and_training_goes_on(small_disk, at_step, tiny, look):
    disk, said = small_disk("8m", 1000), io.StringIO()
    filler = disk / "filler"

    def fill():
        with filler.open("wb") as file:
            file.write(b"\0" * (free_space(disk).bytes - MIB // 4))

    at_step({3: fill, 5: filler.unlink})
    path = run(tiny(), disk / "run", Console(file=said, width=500))
    (failed,) = look(path).events("save failed")
    assert failed["step"] == 4
    assert "needs" in failed["reason"]
    assert "free" in failed["reason"]
    assert "NOT SAVED: " in said.getvalue()
    assert steps(path / "checkpoints") == [2, 6]
    assert look(path).column("step") == [1, 2, 3, 4, 5, 6]


@pytest.mark.tier("thorough")  # checkpoint/store/ shows it without a run
@pytest.mark.parametrize("name", ["metrics.jsonl", "gauges.jsonl"])
def test_a_record_that_cannot_be_written_ends_nothing(train, look, at_step, tmp_path, name):
    """/dev/full answers every write with "No space left on device"."""
    file, said = tmp_path / "run" / name, io.StringIO()

    def fill():
        file.rename(file.with_suffix(".aside"))
        file.symlink_to("/dev/full")

    def free():
        file.unlink()
        file.with_suffix(".aside").rename(file)

    at_step({3: fill, 5: free})
    path = train("run", {"gauges.every": 1}, said)
    expected = train("other", {"gauges.every": 1})
    assert said.getvalue().count("NOT RECORDED") == 1
    assert f"{file} cannot be written (No space left on device); training continues" in said.getvalue()
    assert look(path).column("step") == [1, 2, 3, 4, 5, 6], "nothing is missing"
    assert look(path).column("loss") == look(expected).column("loss")
    assert [line["step"] for line in read_jsonl(path / "gauges.jsonl")] == [
        line["step"] for line in read_jsonl(expected / "gauges.jsonl")
    ]
    assert [event["step"] for event in look(path).events("save")] == [2, 4, 6]
    assert look(path).status["status"] == "done"


@pytest.mark.tier("thorough")  # checkpoint/store/ shows it without a run
def test_a_directory_that_went_away_ends_it(narrowgauge, line, look, tmp_path):
    """As when a network disk is gone: under the old name there may be a directory, and it is another one."""
    out = tmp_path / "run"
    words = line({"training.steps": 100000, "checkpoint.every": 20})
    process = narrowgauge.start(*words, "--out", out)
    process.until(look(out).has_step(2)).send(signal.SIGSTOP)
    out.rename(tmp_path / "elsewhere")
    process.send(signal.SIGCONT)
    ended = process.wait()
    assert ended.code == 1
    (sentence,) = ended.err.splitlines()
    assert sentence.startswith("narrowgauge: [Errno 2]")
    assert f"'{out}'" in sentence
    assert not out.exists(), "nothing was written under the old name"
    assert "NOT RECORDED" in ended.out


def test_a_directory_in_the_place_of_the_run_is_left_alone(train, at_step, tmp_path, look):
    out = tmp_path / "run"

    def swap():
        out.rename(tmp_path / "elsewhere")
        out.mkdir()

    at_step({3: swap})
    with pytest.raises(FileNotFoundError, match="run directory is gone, and another one is in its place"):
        train()
    assert os.listdir(out) == []
    assert look(tmp_path / "elsewhere").column("step") == [1, 2]


@pytest.mark.tier("thorough")
def test_checkpoints_that_cannot_be_written_end_it_at_the_last_save(train, at_step, tmp_path, look):
    checkpoints = tmp_path / "run" / "checkpoints"

    def spoil():
        shutil.rmtree(checkpoints)
        checkpoints.touch()

    at_step({3: spoil})
    with pytest.raises(UserError, match=r"\[Errno 17\] File exists: .*checkpoints"):
        train()
    assert look(tmp_path / "run").column("step")[-1] >= 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permission_that_was_lost(narrowgauge, line, look, tmp_path):
    out = tmp_path / "run"
    process = narrowgauge.start(*line({"training.steps": 200, "checkpoint.every": 20}), "--out", out)
    process.until(look(out).has_step(25)).send(signal.SIGSTOP)
    (out / "checkpoints").chmod(0o500)
    process.send(signal.SIGCONT)
    ended = process.wait()
    (out / "checkpoints").chmod(0o700)
    assert ended.code == 1
    assert "NOT SAVED" in ended.out
    (sentence,) = ended.err.splitlines()
    assert "[Errno 13] Permission denied" in sentence
    assert str(out / "checkpoints") in sentence
