"""What tools of torch's, or of others', do in a loop around a converted model, and what becomes of its state.

Each test is a row of the table in docs/how-to/your-own-loop.md, and each cell works or is refused in a
sentence that the page shows. More rows: `distributed/test_fsdp.py`, and for resume
`optim/test_loop_state.py`.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.quantization import gradient_of, has_gradient, state_of
from nn.layers import COVER
from nn.own_loop import NARROW, assert_same, batch, go_on, model, numbers_of, row, through_a_file, train


def backward(m, number=1):
    m(batch(number)).square().sum().backward()


@row("`clip_grad_norm_`, torch's or the optimizer's")
def test_clipping(name):
    def norm_of(m):
        return torch.stack([gradient_of(p).norm() for p in m.parameters()]).norm()

    for is_torchs in (True, False):
        m = model(name)
        optimizer = ng.AdamW(m.parameters(), name)
        backward(m)
        exact = norm_of(m)
        assert exact > 1
        clip = nn.utils.clip_grad_norm_ if is_torchs else lambda _, n, o=optimizer: o.clip_grad_norm_(n)
        torch.testing.assert_close(clip(m.parameters(), 0.5), exact)
        torch.testing.assert_close(norm_of(m), torch.tensor(0.5), rtol=1e-2, atol=0)


@row("activation checkpointing, both kinds", COVER)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(name, reentrant):
    plain, recomputed = model(name), model(name)

    def run(x):
        return checkpoint(recomputed, x.requires_grad_(), use_reentrant=reentrant)

    # Reentrant, the first pass records no gradients, and so is no step of a loop that says none.
    expected = train(plain, name, says_step=reentrant)
    assert_same(train(recomputed, name, run, says_step=reentrant), expected)


@row("autocast around it", COVER)
def test_autocast(name):
    plain, cast = model(name), model(name)
    with torch.autocast("cpu", torch.bfloat16):
        y = cast[0](batch())
    expected = plain[0](batch())
    assert torch.equal(y, expected)
    for each in (y, expected):
        each.square().sum().backward()
    for p, other in zip(cast[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.equal(gradient_of(p), gradient_of(other))


@row("frozen parameters", COVER)
def test_frozen_parameters(name):
    m, other = model(name), model(name)
    m[0].requires_grad_(False)
    before, x, its_x = numbers_of(m), batch().requires_grad_(), batch().requires_grad_()
    for each, leaf in ((m, x), (other, its_x)):
        ng.set_step(each, 0, 1, 0)
        each(leaf).square().sum().backward()
    assert torch.equal(x.grad, its_x.grad)
    assert not any(has_gradient(p) for p in m[0].parameters())
    for each in (m, other):
        each.zero_grad()
    after, unfrozen = train(m, name, says_step=True), train(other, name, says_step=True)
    for key, tensor in after.items():
        assert torch.equal(tensor, before[key]) == key.startswith("0."), key
        assert not torch.equal(unfrozen[key], before[key])


@row("PEFT: `get_peft_model` with LoRA")
@pytest.mark.tier("thorough", keep=("nvfp4", "msamp-o3"))
@pytest.mark.filterwarnings("ignore")  # of PEFT's
def test_peft(name):
    """Adapters train, what is frozen stays; saved alone, they go onto another model."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    m, config = model(name), peft.LoraConfig(target_modules=["0", "2"], r=4)
    before, adapted = numbers_of(m), peft.get_peft_model(m, config)
    assert type(adapted.base_model.model[0].base_layer) is ng.nn.Linear
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in trained)
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for step in range(1, 9):
        ng.set_step(adapted, 0, step, 0)
        losses.append(adapted(batch()).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.95 * losses[0]
    other = peft.get_peft_model(model(name), config)
    peft.set_peft_model_state_dict(other, peft.get_peft_model_state_dict(adapted))
    if name == "fp8-delayed":  # whose scales a plain state does not hold
        ng.load_state_dict(other, None, ng.state_dict(adapted))
    with torch.no_grad():
        for each in (adapted, other):
            ng.set_step(each, 0, 9, 0)
        assert torch.equal(adapted.eval()(batch()), other.eval()(batch()))
    assert_same(numbers_of(adapted.unload()), before)
    layers = [other.base_model.model[i] for i in (0, 2)]
    wide = [x.base_layer.weight.detach() + x.get_delta_weight("default").detach() for x in layers]
    merged = other.merge_and_unload(safe_merge=name == "msamp-o3")
    for i, w in zip((0, 2), wide, strict=True):  # rounded once
        assert (merged[i].weight.detach() - w).norm() < 2**-4 * w.norm()


@row("`GradScaler`")
def test_a_scaled_loss(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    m, plain = model(name), model(name)
    optimizer = ng.AdamW(m.parameters(), name, lr=1e-2)
    scaler.scale(m(batch()).square().mean()).backward()
    scaler.unscale_(optimizer)
    plain(batch()).square().mean().backward()
    for p, other in zip(m.parameters(), plain.parameters(), strict=True):
        expected = gradient_of(other)
        torch.testing.assert_close(gradient_of(p), expected, rtol=0, atol=0.2 * expected.abs().max().item())
    before = numbers_of(m)
    scaler.step(optimizer)
    assert not torch.equal(before["0.weight"], numbers_of(m)["0.weight"])


@row("`torch.export` for inference")
@pytest.mark.tier("thorough", keep=("msamp-o3",))
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_exported(name):
    m = model(name).eval()
    with torch.no_grad():
        program = torch.export.export(m, (batch(),))
        assert torch.equal(program.module()(batch(2)), m(batch(2)))


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
