"""Copies of metrics and gauges for other programs: right where they arrive, harmless where they do not."""

import json
import sqlite3
from contextlib import closing

import pytest

from narrowgauge.errors import UserError
from narrowgauge.runs.loop.run_writer import NullRunWriter, RunWriter
from narrowgauge.runs.monitor import loggers
from narrowgauge.runs.monitor.loggers import BACKENDS, Feed, Loggers, is_installed, numbers, require_sinks
from support.runs import interrupted

SMALL = {"gauges.every": 3, "training.steps": 6, "checkpoint.every": 2}
PRESENT = {name: is_installed(name) for name in BACKENDS}


def needs(name):
    return pytest.mark.skipif(not PRESENT[name], reason=f"the package {name} is not installed")


class Book:
    """A sink that writes down what it gets, after a number of failures."""

    def __init__(self, failures=0):
        self.failures, self.pages, self.is_closed = failures, [], False

    def log(self, step, values):
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
    amax = {f"{where}/amax_{part}": v for v, part in enumerate(("smallest", "median", "largest"), start=1)}
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


def fed(book, steps, said):
    """What a feed to `book` says of steps from 0 on."""
    feed = Feed("book", book if callable(book) else lambda step: book, said.append)
    for step in range(steps):
        feed.put(step, {"loss": 1.0})
    feed.close()


def test_a_sink_that_is_down_is_told_once_and_tried_again(monkeypatch):
    monkeypatch.setattr(loggers, "RETRY_S", 0.0)
    book, said = Book(failures=3), []
    fed(book, 5, said)
    assert [step for step, _ in book.pages] == [3, 4]
    assert [line[:49] for line in said] == ["NOT SENT to book (ConnectionError: nobody there);"]


def test_a_sink_that_cannot_be_opened_is_not_asked_at_every_step():
    tries, said = [], []

    def open_it(step):
        tries.append(step)
        raise SystemExit("log in first")

    fed(open_it, 5, said)
    assert tries == [0], "the next try is a minute later"
    assert ["SystemExit: log in first" in line for line in said] == [True]


def test_what_is_no_number_is_left_out():
    assert numbers({"step": 1, "event": "x", "lr": 1e-3, "list": [1], "none": None}) == {"lr": 1e-3}


def test_a_sink_that_is_unknown_or_not_installed_is_refused_before_anything_is_made(
    train, tmp_path, monkeypatch
):
    (tmp_path / "trackio_").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("trackio_"), "a folder named as a package"
    require_sinks(())
    wrong = dict.fromkeys(["tensorbord", "wandb,csv"], "'tensorboard', 'wandb' or 'trackio'")
    for name in [name for name, is_there in PRESENT.items() if not is_there][:1]:
        wrong[name] = f"{name} is not installed; python -m pip install {name}, "
    for name, words in wrong.items():
        with pytest.raises(UserError, match=words):
            train(changes={"log.sinks": name})
    assert not (tmp_path / "run").exists()


@pytest.mark.tier("thorough")
@needs("tensorboard")
def test_tensorboard_has_what_the_metrics_have_and_steps_once_that_were_done_twice(train, look):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = train(changes=SMALL | {"log.sinks": "tensorboard"})
    interrupted(path, 6)
    train(changes=SMALL | {"log.sinks": "tensorboard"})
    there = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0})
    there.Reload()
    for key in ("loss", "val_loss", "grad_norm"):
        told = [(line["step"], pytest.approx(line[key])) for line in look(path).lines if key in line]
        assert [(event.step, event.value) for event in there.Scalars(key)] == told, key
    (reading, *_) = map(json.loads, (path / "gauges.jsonl").read_text().splitlines())
    tag = f"gauges/{reading['place']}/{reading['layer']}/zeros"
    assert there.Scalars(tag)[0].value == pytest.approx(reading["zeros"])


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
