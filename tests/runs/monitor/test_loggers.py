"""Copies of metrics and gauges for other programs: right where they arrive, harmless where they do not."""

import json
import signal
import sqlite3
import threading
import time
from contextlib import closing

import pytest

from narrowgauge.errors import UserError
from narrowgauge.runs.loop.run_writer import NullRunWriter, RunWriter
from narrowgauge.runs.monitor import loggers
from narrowgauge.runs.monitor.logger_backends import BACKENDS, is_installed
from narrowgauge.runs.monitor.loggers import Feed, Loggers, numbers, require_sinks

SMALL = {"gauges.every": 3, "training.steps": 6, "checkpoint.every": 2}
PRESENT = {name: is_installed(spec.package) for name, spec in BACKENDS.items()}


def needs(name):
    return pytest.mark.skipif(not PRESENT[name], reason=f"the package {name} is not installed")


class Book:
    """A sink that writes down what it gets, after a number of failures or seconds."""

    def __init__(self, failures=0, seconds=0.0):
        self.failures, self.seconds = failures, seconds
        self.pages, self.is_closed = [], False

    def log(self, step, values):
        time.sleep(self.seconds)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("nobody\nthere")
        self.pages.append((step, dict(values)))

    def close(self):
        self.is_closed = True


def test_a_journal_gives_its_sinks_every_step_and_reading_and_no_event(tmp_path):
    book, said, opened = Book(), [], []
    feed = Feed("book", lambda step: opened.append(step) or book, said.append)
    journal = RunWriter(tmp_path, said.append, sinks=Loggers((feed,)))
    journal.record({"event": "start", "step": 4})
    journal.record({"step": 5, "loss": 2.5, "val_loss": 2.0, "val_tokens": 64, "val_parts": [2.0, 2.0]})
    gauge = {"step": 5, "layer": "blocks.0.qkv", "place": "fprop.x", "cast": "e4m3", "elements": 64}
    journal.record_gauges(iter([{**gauge, "sqnr_db": None, "zeros": 0.25, "amax": [1.0, 2.0, 3.0]}]))
    journal.sinks.close()
    where = "gauges/fprop.x/blocks.0.qkv"
    amax = {
        f"{where}/amax_{part}": v
        for part, v in zip(("smallest", "median", "largest"), (1, 2, 3), strict=True)
    }
    assert book.pages == [(5, {"loss": 2.5, "val_loss": 2.0}), (5, {f"{where}/zeros": 0.25, **amax})]
    assert (opened, book.is_closed, said) == ([5], True, [])
    assert [json.loads(line)["zeros"] for line in journal.gauges.read_text().splitlines()] == [0.25]


def test_only_the_first_process_writes(tmp_path):
    book = Book()
    sinks_of_it = Loggers((Feed("book", lambda step: book, print),))
    bystander = NullRunWriter(tmp_path, print, sinks=sinks_of_it)
    bystander.record({"step": 1, "loss": 2.0})
    bystander.record_gauges([{"step": 1, "layer": "a", "place": "m", "zeros": 0.0}])
    sinks_of_it.close()
    assert book.pages == []
    assert not book.is_closed, "it was never opened"


def test_a_sink_that_is_down_is_told_once_and_tried_again(monkeypatch):
    monkeypatch.setattr(loggers, "RETRY_S", 0.0)
    book, said = Book(failures=3), []
    feed = Feed("book", lambda step: book, said.append)
    for step in range(5):
        feed.put(step, {"loss": 1.0})
    feed.close(time.monotonic() + 10)
    assert [step for step, _ in book.pages] == [3, 4]
    (warning,) = said
    assert warning == (
        "NOT SENT to book (ConnectionError: nobody there); training continues, and metrics.jsonl has "
        "every step"
    )


def test_a_sink_that_cannot_be_opened_is_not_asked_at_every_step():
    tries, said = [], []

    def open_it(step):
        tries.append(step)
        raise SystemExit("log in first")

    feed = Feed("book", open_it, said.append)
    for step in range(5):
        feed.put(step, {})
    feed.close(time.monotonic() + 10)
    assert tries == [0], "the next try is a minute later"
    assert len(said) == 1
    assert "SystemExit: log in first" in said[0]


def test_a_sink_that_hangs_costs_a_step_nothing_and_the_end_little():
    leave, said = threading.Event(), []

    class Hung(Book):
        def log(self, step, values):
            leave.wait(60)

    feed = Feed("book", lambda step: Hung(), said.append)
    start = time.monotonic()
    for step in range(loggers.QUEUE_SIZE + 10):
        feed.put(step, {"loss": 1.0})
    assert time.monotonic() - start < 1.0
    assert [line.split(";")[0] for line in said] == ["NOT SENT to book (it does not keep up)"]
    start = time.monotonic()
    feed.close(start + 0.2)
    assert 0.2 <= time.monotonic() - start < 2.0
    assert said[1].startswith("book: not finished in time")
    leave.set()


def test_what_is_no_number_is_left_out():
    assert numbers({"step": 1, "event": "x", "lr": 1e-3, "list": [1], "none": None}) == {"lr": 1e-3}


def test_a_sink_without_its_package_is_refused_before_anything_is_made(train, tmp_path):
    absent = [name for name, is_there in PRESENT.items() if not is_there]
    if not absent:
        pytest.skip("all packages are installed")
    with pytest.raises(UserError, match=f"{absent[0]} is not installed; python -m pip install {absent[0]}, "):
        train(changes={"log.sinks": absent[0]})
    assert not (tmp_path / "run").exists()


def test_a_folder_named_as_a_package_is_none(tmp_path, monkeypatch):
    (tmp_path / "trackio_").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("trackio_")
    require_sinks(())


@pytest.mark.parametrize("name", ["tensorbord", "wandb,csv"])
def test_unknown_sinks_are_refused(train, name):
    with pytest.raises(UserError, match="'tensorboard', 'wandb' or 'trackio'"):
        train(changes={"log.sinks": name})


@needs("tensorboard")
def test_tensorboard_has_what_the_metrics_have(narrowgauge, line, look, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = narrowgauge(*line(SMALL | {"log.sinks": "tensorboard"}), "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    there = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    there.Reload()
    run = look(tmp_path / "run")
    for key in ("loss", "val_loss", "grad_norm"):
        told = {line["step"]: line[key] for line in run.lines if key in line}
        assert {event.step: event.value for event in there.Scalars(key)} == pytest.approx(told), key
    (reading, *_) = map(json.loads, (tmp_path / "run" / "gauges.jsonl").read_text().splitlines())
    tag = f"gauges/{reading['place']}/{reading['layer']}/zeros"
    assert there.Scalars(tag)[0].value == pytest.approx(reading["zeros"])


@pytest.mark.tier("thorough")
@needs("tensorboard")
def test_tensorboard_shows_steps_once_that_were_done_twice(narrowgauge, line, look, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = look(tmp_path / "run")
    changes = {
        "training.steps": 400,
        "checkpoint.every": 50,
        "validation.every": 400,
        "log.sinks": "tensorboard",
    }
    words = [*line(changes), "--out", run.path]
    assert narrowgauge.start(*words).send_when(run.has_step(130), signal.SIGKILL).code == -signal.SIGKILL
    ended = narrowgauge(*words)
    assert ended.code == 0, ended.err
    there = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    there.Reload()
    shown = [event.step for event in there.Scalars("loss")]
    assert len(set(shown)) == len(shown)
    assert shown[-1] == 400
    resumed = run.events("resume")[0]["step"]
    assert set(range(resumed + 1, 401)) <= set(shown)
    losses = dict(zip(run.column("step"), run.column("loss"), strict=True))
    assert [event.value for event in there.Scalars("loss")] == pytest.approx([losses[n] for n in shown])


@needs("wandb")
def test_wandb_offline_goes_on_with_the_same_run(narrowgauge, line, tmp_path):
    words = line(SMALL | {"log.sinks": "wandb"})
    ended = narrowgauge(*words, "--out", tmp_path / "run", WANDB_MODE="offline")
    assert ended.code == 0, ended.err
    folder = tmp_path / "run" / "wandb"
    identity = (folder / "narrowgauge-id").read_text()
    (file,) = folder.glob(f"offline-run-*/run-{identity}.wandb")
    assert b"val_loss" in file.read_bytes()
    assert b"gauges/fprop.x/" in file.read_bytes()


@needs("trackio")
def test_trackio_has_what_the_metrics_have(narrowgauge, line, look, tmp_path):
    words = line(SMALL | {"log.sinks": "trackio"})
    ended = narrowgauge(*words, "--out", tmp_path / "run", TRACKIO_DIR=str(tmp_path / "trackio"))
    assert ended.code == 0, ended.err
    (file,) = (tmp_path / "trackio").glob("narrowgauge*.db")
    with closing(sqlite3.connect(file)) as base:
        rows = base.execute("select step, metrics from metrics order by step, id").fetchall()
    records = [(step, json.loads(values)) for step, values in rows]
    told = {step: record["loss"] for step, record in records if "loss" in record}
    assert told == dict(enumerate(look(tmp_path / "run").column("loss"), start=1))
