"""Copies of metrics and gauges for other programs: right where they arrive, harmless where they do not."""

import json

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.runs.monitor.loggers import SINKS, Loggers, is_installed, require_sinks
from narrowgauge.trainer.runs.run_directory import RunWriter
from support.runs import interrupted

SMALL = {"gauges.every": 3, "training.steps": 6, "checkpoint.every": 2}
PRESENT = {name: is_installed(name) for name in SINKS}


def test_a_journal_gives_its_sinks_every_step_and_reading_and_no_event(tmp_path):
    pages, said, closed = [], [], []

    def book(first):
        return (lambda *page: pages.append(page)), lambda: closed.append(first)

    journal = RunWriter(tmp_path, said.append, sinks=Loggers({"book": book}, said.append))
    journal.record({"event": "start", "step": 4})
    journal.record(
        {"step": 5, "loss": 2.5, "val_loss": 2.0, "val_tokens": 64, "val_parts": [2.0, 2.0], "x": None}
    )
    gauge = {"step": 5, "layer": "blocks.0.qkv", "place": "fprop.x", "cast": "e4m3", "elements": 64}
    journal.record_gauges(iter([{**gauge, "sqnr_db": None, "zeros": 0.25, "amax": [1.0, 2.0, 3.0]}]))
    journal.sinks.close()
    where = "gauges/fprop.x/blocks.0.qkv"
    amax = {f"{where}/amax_{part}": v for v, part in enumerate(("smallest", "median", "largest"), start=1)}
    assert pages == [(5, {"loss": 2.5, "val_loss": 2.0}), (5, {f"{where}/zeros": 0.25, **amax})]
    assert (closed, said) == ([5], [])
    assert [json.loads(line)["zeros"] for line in journal.gauges.read_text().splitlines()] == [0.25]


def test_a_run_goes_on_without_a_sink_that_fails():
    pages, said, tries = [], [], []

    def fails(step, values):
        raise ConnectionError("connection\nrefused")

    def cannot_be_opened(step):
        tries.append(step)
        raise SystemExit("log in first")

    openers = {"down": lambda step: (fails, fails), "closed": cannot_be_opened}
    sinks = Loggers(openers | {"book": lambda step: (lambda *page: pages.append(page), int)}, said.append)
    for step in range(3):
        sinks.metrics({"step": step, "loss": 1.0})
    sinks.close()
    assert pages == [(step, {"loss": 1.0}) for step in range(3)]
    assert tries == [0]
    words = "; training continues, and metrics.jsonl has every step"
    assert said == [
        f"NOT SENT to down from now on (ConnectionError: connection refused){words}",
        f"NOT SENT to closed from now on (SystemExit: log in first){words}",
    ]


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
@pytest.mark.skipif(not PRESENT["tensorboard"], reason="the package tensorboard is not installed")
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
