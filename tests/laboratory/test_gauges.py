"""Gauges in a loop: every step is read, nothing changes, and nothing stays attached."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.system.errors import UserError


def model_of(recipe="mxfp4"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    return ng.convert(model, recipe)


def train(model, optimizer, steps=3, micro_batches=2):
    for step in range(steps):
        for part in range(micro_batches):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + part))
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def adamw(model):
    return ng.AdamW(model.parameters(), recipe="mxfp4", lr=1e-2)


@pytest.mark.parametrize("make", [adamw, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)])
def test_every_step_is_read_and_no_value_changes(make):
    model, same = model_of(), model_of()
    with ng.gauges(model) as gauges:
        seen = train(model, make(model))
    assert all(map(torch.equal, seen, train(same, make(same))))
    assert list(gauges.readings) == [1, 2, 3]
    places = {row.place for row in gauges.map()}
    assert {"fprop.x", "fprop.w", "dgrad.dy", "wgrad.x", "fprop.y", "weight", "grad"} <= places
    assert all(layer.observer is None for layer in (model[0], model[2]))


def test_the_noise_is_that_of_the_cast():
    model = model_of()
    x = torch.randn(16, 64)
    with ng.gauges(model) as gauges:
        model(x)
    assert all(layer.observer is None for layer in (model[0], model[2])), "after a pass without an update"
    first = next(row for row in gauges.map() if (row.layer, row.place) == ("0", "fprop.x"))
    seen = ng.quantize(x, "mxfp4").dequantize()
    expected = 10 * torch.log10(x.square().sum() / (seen - x).square().sum())
    assert first.snr_db == pytest.approx(float(expected), rel=1e-4)
    assert first["snr_db"] == first.snr_db
    assert f"{first.snr_db:.2f}" in str(gauges.map())


def test_readings_every_other_step_with_a_custom_gauge(tmp_path):
    model = model_of()
    with ng.gauges(model, every=2, own={"top": lambda x, seen: x.abs().max()}) as gauges:
        train(model, adamw(model), steps=4)
    assert list(gauges.readings) == [2, 4]
    operands = [row for row in gauges.map(2) if row.place == "fprop.x"]
    assert all(row["top"] > 0 for row in operands)
    assert gauges.entries()["narrowgauge/fprop.x/sqnr_db"] > 10
    page = gauges.report(tmp_path / "x.html").read_text()
    assert "fprop.x" in page
    with pytest.raises(UserError, match="step 3 was not read; those that were: 2, 4"):
        gauges.map(3)


def test_what_is_not_read_or_not_attached_says_so(tmp_path):
    """A step of another model is none of this one, and a loop that fails leaves nothing attached."""
    model, other = model_of(), model_of()
    with ng.gauges(model) as gauges:
        train(other, adamw(other))
    for ask in (gauges.map, lambda: gauges.report(tmp_path / "x.html")):
        with pytest.raises(UserError, match="nothing was read"):
            ask()
    with pytest.raises(UserError, match="give a tensor"), ng.gauges(model):
        model(torch.randn(4, 65))
    assert model[0].observer is None
    for arguments, given, words in [
        (torch.nn.Linear(4, 4), {}, "has no layer under a recipe"),
        (model, {"every": 0}, "every = 0"),
        (model, {"to": "runs/mine"}, "'runs/mine' is not a reporter: it needs log"),
    ]:
        with pytest.raises(UserError, match=words):
            ng.gauges(arguments, **given)


class Recorder:
    """A stand-in for a program that this environment lacks: the method that it has, and what it was given."""

    def __init__(self, method, module="some"):
        self.calls = []
        self.kind = type(
            "Program", (), {"__module__": module, method: lambda _, *a, **k: self.calls.append((a, k))}
        )


#: The method of a program, its module, and what its calls take besides the values.
PROGRAMS = [
    ("log", "wandb.sdk.wandb_run", {"commit": False}),
    ("log", "trackio.run", {"step": 2}),
    ("log_metrics", "mlflow", {"step": 2}),
    ("add_scalar", "torch.utils.tensorboard.writer", {}),
]


@pytest.mark.parametrize(("method", "module", "extra"), PROGRAMS)
def test_a_program_gets_what_its_own_calls_take_and_so_do_several(method, module, extra):
    model, recorder, seen = model_of(), Recorder(method, module), {}
    with ng.gauges(model, every=2, to=[recorder.kind(), seen.__setitem__]) as gauges:
        train(model, adamw(model), steps=3)
    assert all(keywords == extra for _, keywords in recorder.calls)
    if method == "add_scalar":
        values = {name: x for (name, x, step), _ in recorder.calls if step == 2}
    else:
        (((values,), _),) = recorder.calls
    assert values.pop("narrowgauge/step", 2) == 2
    assert values == gauges.entries() == seen[2]
    assert values["narrowgauge/fprop.x/sqnr_db"] > 10
