"""What becomes of a converted model's state: copied, saved, loaded, cast, made without numbers.

Each test is a row of the table in docs/how-to/your-own-loop.md.
"""

import copy
import io

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.quantization import state_of
from nn.own_loop import NARROW, assert_same, batch, go_on, is_on_page, model, numbers_of, row, train


@row("`copy.deepcopy`")
def test_a_copy_goes_its_own_way(name):
    m = model(name)
    before = numbers_of(m)
    twin = copy.deepcopy(m)
    trained = train(twin, name)
    assert_same(numbers_of(m), before)
    assert_same(train(m, name), trained)


@row("`state_dict` to a plain model and back")
def test_state_dict_both_ways(name):
    m = model(name)
    trained = train(m, name)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    plain.load_state_dict(trained)
    assert all(p.dtype == torch.float32 for p in plain.parameters())
    back = model(name, seed=5)
    back.load_state_dict(plain.state_dict())
    assert_same(numbers_of(back), trained)


@row("`torch.save` of a state dict")
def test_saved_state(name):
    m = model(name)
    trained = train(m, name)
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), trained)


@row("both `state_dict`s, as DCP, accelerate and Lightning save them: resume")  # optim/test_carried_state.py
def test_both_state_dicts(name):
    m, other = model(name), model(name, seed=5)
    optimizer, its_optimizer = (ng.AdamW(each.parameters(), name, lr=1e-2) for each in (m, other))
    go_on(m, optimizer, (1, 2))
    saved = copy.deepcopy((m.state_dict(), optimizer.state_dict()))
    if name in NARROW:
        with pytest.raises(UserError) as raised:
            its_optimizer.load_state_dict(saved[1])
        assert is_on_page(raised.value)
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    assert_same(go_on(other, its_optimizer, (3,)), go_on(m, optimizer, (3,)))


@row("`torch.save` of the whole model")
def test_a_saved_model_goes_on(name):
    m = model(name)
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert_same(train(again, name), train(m, name))


@row("`model.half()`, `.to(torch.bfloat16)`")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype(name, dtype):
    m = model(name)
    before = numbers_of(m)
    m.to(dtype)
    for key, tensor in m.state_dict().items():
        is_kept = state_of(m.get_parameter(key)).weight is not None
        assert torch.equal(tensor.float(), before[key] if is_kept else before[key].to(dtype).float()), key
    y = m(batch().to(dtype))
    assert y.dtype == dtype
    y.float().square().mean().backward()
    optimizer = ng.AdamW(m.parameters(), name, lr=1e-1)
    optimizer.step()
    assert all(t.isfinite().all() for t in m.state_dict().values())
    assert not torch.equal(m.state_dict()["0.weight"].float(), before["0.weight"])


@row("models under different recipes in one process")
def test_two_models(name):
    expected = train(model(name), name), train(model("mxfp4"), "mxfp4")
    pair = (model(name), name), (model("mxfp4"), "mxfp4")
    optimizers = [ng.AdamW(m.parameters(), recipe, lr=1e-2) for m, recipe in pair]
    for number in (1, 2, 3):
        for (m, _), optimizer in zip(pair, optimizers, strict=True):
            m(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (m, _), alone in zip(pair, expected, strict=True):
        assert_same(numbers_of(m), alone)


@row("meta device, `to_empty`, `load_state_dict`")
def test_from_the_meta_device(name):
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    m = ng.convert(blank, name).to_empty(device="cpu")
    other, start = model(name, seed=5), numbers_of(model(name))
    for each in (m, other):
        each.load_state_dict(start)
    assert_same(train(m, name), train(other, name))


@row("averaged weights (`AveragedModel`)")
def test_averaged_weights(name):
    m = model(name)
    averaged = torch.optim.swa_utils.AveragedModel(m)
    averaged.update_parameters(m)
    train(m, name)
    averaged.update_parameters(m)
    first, last = numbers_of(model(name)), numbers_of(m)
    for key, tensor in numbers_of(averaged.module).items():
        tolerance = {"bf16-sr": 2.0**-7, "msamp-o3": 2.0**-3}.get(name, 1.3e-6)  # of the formats
        torch.testing.assert_close(tensor, (first[key] + last[key]) / 2, rtol=tolerance, atol=1e-3)
