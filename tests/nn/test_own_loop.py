"""What tools of torch's, or of others', do in a loop around a converted model.

Each test is a row of the table in docs/how-to/your-own-loop.md, and each cell works or is refused in a
sentence that the page shows. More rows: `test_own_loop_state.py`, `distributed/test_data_parallel.py`, and
for resume `optim/test_loop_state.py`.
"""

import importlib.util

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.quantization import gradient_of, has_gradient, state_of
from nn.own_loop import NARROW, WIDE, assert_same, batch, is_on_page, model, numbers_of, row, train


@row("optimizers of torch's, schedule-free, bitsandbytes")
def test_an_optimizer_of_torchs(name):
    m, alone = model(name), model(name)
    for each in (m, alone):
        each(batch()).square().mean().backward()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    if name in NARROW:  # others in test_other_optimizers.py
        with pytest.raises(UserError, match="while its gradient waits for an optimizer"):
            optimizer.step()
        return
    optimizer.step()
    for p, other in zip(m.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), other - 0.1 * other.grad)


@row("`nn.init`, writing to a weight in place")
def test_writing_to_a_weight(name):
    m = model(name)
    zeros = {key: torch.zeros_like(t) for key, t in m.state_dict().items()}
    nn.init.zeros_(m[2].weight)
    assert_same({"2.weight": m.state_dict()["2.weight"]}, {"2.weight": zeros["2.weight"]})
    nn.init.zeros_(m[2].bias)
    assert not m(batch()).any()


@row("gradient accumulation")
def test_micro_batches_add_up(name):
    together, parts = model(name), [model(name) for _ in range(2)]
    for number, part in enumerate(parts):
        for m in (part, together):
            ng.set_step(m, 0, 1, 16 * number)
            m(batch(number)).square().sum().backward()
    gradients = ([gradient_of(p) for p in part.parameters()] for part in parts)
    for p, *both in zip(together.parameters(), *gradients, strict=True):
        total = sum(both)
        tolerance = 0.3 if state_of(p).gradient is not None else 1e-6  # each sum is rounded, up or down
        torch.testing.assert_close(gradient_of(p), total, rtol=0, atol=tolerance * total.abs().max().item())


@row("a second derivative (gradient penalties, Hessians)")
def test_a_second_derivative_is_refused(name):
    x = batch().requires_grad_()
    with pytest.raises(UserError) as raised:
        torch.autograd.grad(model(name)(x).square().sum(), x, create_graph=True)
    assert is_on_page(raised.value)


@row("`clip_grad_norm_`, torch's or the optimizer's")
def test_clipping(name):
    norms, clipped = [], []
    for is_torchs in (True, False):
        m = model(name)
        optimizer = ng.AdamW(m.parameters(), name)
        m(batch()).square().sum().backward()
        exact = torch.stack([gradient_of(p).norm() for p in m.parameters()]).norm()
        clip = nn.utils.clip_grad_norm_ if is_torchs else None
        norm = clip(m.parameters(), 0.5) if clip else optimizer.clip_grad_norm_(0.5)
        torch.testing.assert_close(norm, exact)
        norms.append(norm)
        clipped.append(torch.stack([gradient_of(p).norm() for p in m.parameters()]).norm())
    assert norms[0] > 1
    torch.testing.assert_close(clipped, [torch.tensor(0.5)] * 2, rtol=1e-2, atol=0)


@row("activation checkpointing, both kinds")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(name, reentrant):
    plain, recomputed = model(name), model(name)

    def run(x):
        return checkpoint(recomputed, x.requires_grad_(), use_reentrant=reentrant)

    assert_same(train(recomputed, name, run, says_step=True), train(plain, name, says_step=True))


@row("autocast around it")
def test_autocast(name):
    plain, cast = model(name), model(name)
    with torch.autocast("cpu", torch.bfloat16):
        y = cast[0](batch())
    expected = plain[0](batch())
    assert torch.equal(y, expected)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = (
            nn.Embedding(16, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 16, False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids)))


@row("tied weights")
def test_tied_weights_stay_one_and_wide(name):
    torch.manual_seed(0)
    m = ng.convert(Tied(), name)
    assert m.head.weight is m.embedding.weight
    assert m.head.weight.dtype == torch.float32
    optimizer = ng.AdamW(m.parameters(), name, lr=1e-2)
    before = numbers_of(m)
    m(torch.arange(16)).square().mean().backward()
    assert m.head.weight.grad is m.embedding.weight.grad
    optimizer.step()
    assert not torch.equal(before["head.weight"], m.head.weight)
    assert torch.equal(m.head.weight, m.embedding.weight)


@row("frozen parameters")
def test_frozen_parameters(name):
    m, other = model(name), model(name)
    m[0].requires_grad_(False)
    before = numbers_of(m)
    x = batch().requires_grad_()
    m(x).square().sum().backward()
    assert x.grad.abs().max() > 0
    assert not any(has_gradient(p) for p in m[0].parameters())
    m.zero_grad()
    after, unfrozen = train(m, name), train(other, name)
    for key, tensor in after.items():
        assert torch.equal(tensor, before[key]) == key.startswith("0."), key
        assert not torch.equal(unfrozen[key], before[key])


class Adapter(nn.Module):
    """LoRA as PEFT lays it: the layer stays inside, frozen, and two small matrices are added."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.a, self.b = nn.Linear(layer.in_features, rank, False), nn.Linear(rank, layer.out_features, False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


@row("adapters around a layer (LoRA)")
def test_adapters(name):
    m = model(name)
    before, plain = numbers_of(m), m(batch()).detach()
    m[0], m[2] = Adapter(m[0]), Adapter(m[2])
    m.train()
    if name != "nvfp4":  # whose random bits belong to another pass
        assert (m(batch()) - plain).norm() < 0.2 * plain.norm()
    trained = [p for p in m.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(8):
        loss = m(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert_same({key: m.state_dict()[key.replace(".", ".base_layer.")] for key in before}, before)


@row("PEFT: `get_peft_model` with LoRA")
@pytest.mark.tier("thorough", keep=("nvfp4", "msamp-o3"))
@pytest.mark.filterwarnings("ignore")  # of PEFT's
def test_peft(name):
    """Adapters are wide and train, what is frozen stays; saved alone, they go onto another model."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["0", "2"], r=4)
    m = model(name)
    before = numbers_of(m)
    adapted = peft.get_peft_model(m, config)
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in trained.items())
    assert type(adapted.base_model.model[0].base_layer) is ng.nn.Linear
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for step in range(1, 9):
        ng.set_step(adapted, 0, step, 0)
        loss = adapted(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
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


@pytest.mark.parametrize("name", ["nvfp4", "bf16-sr", "msamp-o2", "msamp-o3", "eco"])
@pytest.mark.filterwarnings("ignore")  # of PEFT's
@pytest.mark.parametrize("is_safe", [False, True], ids=["in place", "safe_merge"])
def test_peft_merges(name, is_safe):
    """Into the weight, rounded once, and out of it again."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False)
    m = model(name)
    before = numbers_of(m)
    adapted = peft.get_peft_model(m, config)
    layers = [adapted.base_model.model[i] for i in (0, 2)]
    expected = [x.base_layer.weight.detach() + x.get_delta_weight("default").detach() for x in layers]
    last = {"bf16-sr": 2**-7, "msamp-o3": 2**-4, "eco": 2**-4}.get(name, 2**-10)
    if not is_safe:
        adapted.merge_adapter()
        adapted.unmerge_adapter()
        for i, x in zip((0, 2), layers, strict=True):
            largest = max(w.abs().max().item() for w in expected)
            found = x.base_layer.weight.detach().clone()
            torch.testing.assert_close(found, before[f"{i}.weight"], rtol=0, atol=2 * last * largest)
    merged = adapted.merge_and_unload(safe_merge=is_safe)
    for i, wide in zip((0, 2), expected, strict=True):
        error = (merged[i].weight.detach().float() - wide).norm() / wide.norm()
        assert error < last


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


@pytest.mark.tier("nightly", keep=2)
@pytest.mark.tier("thorough")  # compiles for seconds; test_compile.py keeps some
@row("`torch.compile`")  # nvfp4: `test_compile.py`
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled(name):
    """One graph, or one that breaks at each layer whose gradient is written on the side."""
    torch._dynamo.reset()
    m, eager = model(name), model(name)
    compiled = torch.compile(m, fullgraph=name in WIDE, backend="aot_eager")
    assert_same(train(m, name, compiled, (1, 2)), train(eager, name, numbers=(1, 2)))


@pytest.mark.tier("thorough")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# torch 2.14 hides this one, unless warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("says_step", "ended"), [(True, 2), (False, 5)])
def test_compiled_each_pass_is_a_step_unless_the_loop_says_the_step(says_step, ended):
    torch._dynamo.reset()
    layer = ng.convert(nn.Sequential(nn.Linear(32, 32)), "fp8-delayed")
    compiled, optimizer = torch.compile(layer, backend="aot_eager"), torch.optim.SGD(layer.parameters())
    for step in range(1, 4):
        for part in range(2):
            if says_step:
                ng.set_step(layer, 0, step, 16 * part)
            compiled(batch(2 * step + part)).square().mean().backward()
        optimizer.step()
    assert layer[0].histories["fprop.x"].entries.count_nonzero() == ended, "the last has not ended"


@row("`torch.export` for inference")
@pytest.mark.tier("thorough", keep=("fp8-delayed", "msamp-o3"))
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_exported(name):
    m = model(name).eval()
    with torch.no_grad():
        program = torch.export.export(m, (batch(),))
        assert torch.equal(program.module()(batch(2)), m(batch(2)))


@row("Hugging Face `Trainer`")
def test_trainer(name, tmp_path):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("Trainer needs accelerate, which is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    m = Labelled(model(name))
    before = numbers_of(m)
    arguments = transformers.TrainingArguments(tmp_path, max_steps=2, report_to=[], use_cpu=True)
    examples = [{"x": x, "labels": x} for x in batch()]
    optimizers = (ng.AdamW(m.parameters(), name, lr=1e-2), None)
    transformers.Trainer(m, arguments, train_dataset=examples, optimizers=optimizers).train()
    assert not torch.equal(numbers_of(m)["net.0.weight"], before["net.0.weight"])


class Labelled(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        y = self.net(x)
        return {"loss": (y - labels).square().mean(), "logits": y}
