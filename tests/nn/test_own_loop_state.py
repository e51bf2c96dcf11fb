"""What becomes of a converted model's state: copied, saved, loaded, cast, made without numbers.

Each test is a row of the table in docs/how-to/your-own-loop.md.
"""

import copy

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.quantization import state_of
from nn.layers import COVER
from nn.own_loop import NARROW, assert_same, batch, go_on, model, numbers_of, row, through_a_file, train


@row("`copy.deepcopy`", COVER)
def test_a_copy_goes_its_own_way(name):
    m = model(name)
    before = train(m, name)
    trained = train(copy.deepcopy(m), name)
    assert_same(numbers_of(m), before)
    assert_same(train(m, name), trained)


@row("`state_dict` to a plain model and back", COVER)
def test_state_dict_both_ways(name):
    trained = train(model(name), name)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    plain.load_state_dict(trained)
    assert all(p.dtype == torch.float32 for p in plain.parameters())
    back = model(name, seed=5)
    back.load_state_dict(plain.state_dict())
    assert_same(numbers_of(back), trained)


@row("`torch.save` of the whole model")
def test_a_saved_model_goes_on(name):
    m = model(name)
    again = through_a_file(m, weights_only=False)
    assert_same(train(again, name), train(m, name))


@row("`model.half()`, `.to(torch.bfloat16)`", COVER)
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
    if name not in NARROW:  # as a plain model that is cast before its conversion
        plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        plain.load_state_dict(before)
        assert torch.equal(ng.convert(plain.to(dtype), name)(batch().to(dtype)), y)
    y.float().square().mean().backward()
    ng.AdamW(m.parameters(), name, lr=1e-1).step()
    assert all(t.isfinite().all() for t in m.state_dict().values())
    assert not torch.equal(m.state_dict()["0.weight"].float(), before["0.weight"])


@row("models under different recipes in one process")
def test_two_models(name):
    alone = [train(model(under), under) for under in (name, "mxfp4")]
    pair = [(m := model(under), ng.AdamW(m.parameters(), under, lr=1e-2)) for under in (name, "mxfp4")]
    for number in (1, 2, 3):
        for m, optimizer in pair:
            go_on(m, optimizer, (number,))
    for (m, _), expected in zip(pair, alone, strict=True):
        assert_same(numbers_of(m), expected)


@row("meta device, `to_empty`, `load_state_dict`")
@pytest.mark.parametrize("assigns", [False, True])
def test_from_the_meta_device(name, assigns):
    """As large models are loaded: tensors without values first, then those of a file."""
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    m = ng.convert(blank, name)
    m = m if assigns else m.to_empty(device="cpu")
    other, start = model(name, seed=5), numbers_of(model(name))
    for each in (m, other):
        each.load_state_dict({k: t.clone() for k, t in start.items()}, assign=assigns)
    assert_same(train(m, name), train(other, name))
    assert not any(p.is_meta for p in m.parameters())
