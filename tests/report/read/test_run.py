"""Reading run directories back: whole, torn, young, diverged."""

import json
import math
from pathlib import Path

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.report import Validation, read_run, read_runs
from narrowgauge.trainer.report.read.records import as_float, read_metrics


def test_a_whole_run_reads_back_as_it_was_written(make_run):
    run = read_run(make_run("fp8", steps=200, mfu=0.4))
    steps = [line for line in make_run.records(run.path) if "loss" in line]
    assert (run.name, run.status, run.recipe, run.backend) == ("fp8", "done", "fp8", "emulated")
    assert [step.loss for step in run.steps] == [line["loss"] for line in steps]
    assert run.final_train_loss == pytest.approx(sum(line["loss"] for line in steps[-10:]) / 10)
    assert run.validation[0] == Validation(0, 0, 10.9)
    assert run.final_val_loss == steps[-1]["val_loss"]
    assert (run.peak_memory_bytes, run.tokens, run.mfu) == (3_000_000_200, 200 * 65_536, 0.4)
    assert 3000 < run.tokens_per_s < 3200, "the slow first steps do not count"
    assert run.facts["peak_source"].startswith("989 TFLOP/s")
    assert run.steps[-1].seconds == pytest.approx(sum(line["step_ms"] for line in steps) / 1000)
    assert run.samples == [("Once", "Once upon a time there was a number.")]
    assert (run.count("save"), run.count("resume"), run.count("skip")) == (10, 1, 0)
    assert run.config["optimizer"]["betas"] == [0.9, 0.95]


def test_a_file_cut_anywhere_keeps_every_whole_line_before_the_cut(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 8)]
    path, text = tmp_path / "metrics.jsonl", "\n".join(lines)
    for cut in range(len(text) + 1):
        path.write_text(text[:cut])
        records, _, ignored = read_metrics(path)
        whole = [line for line in text[:cut].split("\n") if line in lines]
        assert list(records.values()) == [json.loads(line) for line in whole]
        assert ignored == (text[:cut].split("\n")[-1] not in ("", *lines))


def test_lines_that_are_no_record_do_no_harm(make_run):
    odd = ["[1, 2]", "7", '{"loss": 1}', '{"step": "x", "loss": 1}', "\x00\x00", '{"a', "[" * 9999]
    path = make_run(steps=20)
    make_run.append(path, "\n".join([*odd, '{"step": 21, "loss": 2.5}\n']))
    run = read_run(path)
    assert (run.ignored_lines, run.steps[-1].step, run.steps[-1].loss) == (len(odd), 21, 2.5)


def test_the_last_record_of_a_step_wins_key_by_key_and_steps_are_in_order(make_run):
    path = make_run(steps=20)
    make_run.append(
        path, '{"event": "resume", "step": 17}\n{"step": 18, "loss": 1.25}\n{"step": 19, "loss": 1.5}\n'
    )
    run = read_run(path)
    assert [step.step for step in run.steps] == list(range(1, 21))
    assert [step.loss for step in run.steps[17:19]] == [1.25, 1.5]
    lines = ({"step": 2, "loss": 3, "val_loss": 4}, {"step": 1, "loss": 9}, {"step": 2, "loss": 2})
    make_run.write(path, lines)
    records, events, ignored = read_metrics(path / "metrics.jsonl")
    assert list(records.items()) == [(1, lines[1]), (2, {"step": 2, "loss": 2, "val_loss": 4})]
    assert (events, ignored) == ([], 0)


def test_words_and_truths_are_no_numbers():
    assert all(math.isnan(as_float(value)) for value in ("3", None, True, [1]))
    assert as_float(3) == 3.0


def test_records_that_lack_keys_take_them_from_others(tmp_path, make_run):
    """Sparse records count their time for each step they stand for; a validation alone takes the tokens."""
    make_run.write(tmp_path, [{"step": 10 * i, "loss": 3, "step_ms": 100 * i} for i in (1, 2)])
    assert [step.seconds for step in read_run(tmp_path).steps] == pytest.approx([1.0, 3.0])
    lines = ({"step": 0, "val_loss": 9}, {"step": 4, "loss": 3, "tokens": 400}, {"step": 5, "val_loss": 2})
    make_run.write(tmp_path, lines)
    assert read_run(tmp_path).validation == [Validation(0, 0, 9.0), Validation(5, 400, 2.0)]


def test_a_run_that_has_only_a_configuration_is_young_not_broken(make_run):
    path = make_run()
    (path / "metrics.jsonl").unlink()
    (path / "status.json").write_text('{"stat')
    run = read_run(path)
    assert (run.steps, run.validation, run.events, run.status) == ([], [], [], "unknown")
    values = (run.final_train_loss, run.final_val_loss, run.tokens_per_s, run.mfu, run.peak_memory_bytes)
    assert values == (None,) * 5
    assert run.recipe == "fp8", "from the configuration"


def test_what_is_no_run_is_refused_with_the_way_out(make_run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, found in (("empty", "holds neither"), ("file", "not a directory")):
        words = rf"{name}' is not a run: .*config.toml.*{found}.*give the directory"
        with pytest.raises(UserError, match=words):
            read_run(tmp_path / name)
    path = make_run()
    (path / "config.toml").write_text("steps = = 3")
    with pytest.raises(UserError, match=r"config.toml' is not valid TOML \(.*line 1"):
        read_run(path)
    with pytest.raises(UserError, match="at least one run"):
        read_runs([])


def test_equal_names_are_told_apart_by_their_parents(make_run, monkeypatch):
    paths = [make_run("a/fp8"), make_run("b/fp8"), make_run("bf16")]
    assert [run.name for run in read_runs(paths)] == ["a/fp8", "b/fp8", "bf16"]
    assert len(read_runs([paths[0], paths[0] / ".." / "fp8"])) == 1, "the same run twice is one run"
    monkeypatch.chdir(paths[2])
    assert read_run(Path(".")).name == "bf16"
