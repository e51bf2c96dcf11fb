"""The account of memory: counted by hand, reported by the run, equal to what was expected, and obeyed.

`train` and `plan` expect it of every recipe, on every way to divide a run in two.
"""

import pytest
import torch

from narrowgauge.distributed import ParallelDims
from narrowgauge.kernels import choose_products
from narrowgauge.quantization import state_of
from narrowgauge.recipes import recipe, recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.system.units import parse_bytes
from narrowgauge.trainer.data import prepare
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.simulate import estimate_step, memory
from narrowgauge.trainer.simulate.memory import MemoryTracker
from narrowgauge.trainer.simulate.memory_estimate import estimate_memory
from narrowgauge.trainer.simulate.step import simulate_step
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer
from support.runs import config_of

CPU = torch.device("cpu")
WIDE = {"model.dim": 128, "model.ffn_dim": 256}  # matrices large enough for narrow moments


@pytest.fixture(autouse=True)
def products():
    """One arithmetic on every CPU: attention keeps operands twice as wide where matmuls are in fp32."""
    choose_products("bf16")
    yield
    choose_products("")


def step(tiny, text, changes):
    """(trainer, its memory) after one tracked step."""
    trainer = Trainer.begin(make_config(tiny(WIDE | changes)), CPU)
    corpus = prepare(text, "bytes")
    with MemoryTracker(CPU) as watch:
        trainer.train_step(trainer.batches(corpus.train), watch.after_forward)
    return trainer, watch.measured(trainer)


def test_operations_are_counted_until_they_are_gone():
    watch = MemoryTracker(CPU)
    before = torch.ones(1000)
    with watch:
        a = before * 2
        b = a.view(10, 100) + 1
        watch.after_forward()
        a.mul_(2)
        del a
        c = torch.cat([b, b])
        del b, c
        assert watch.alive == 0
    assert (watch.saved, watch.peak) == (8000, 12000)


@pytest.mark.tier("nightly", keep=("fp8", "bf16", "msamp-o3", "coat", "eco", "nvfp4", "fp8-attention"))
@pytest.mark.tier("thorough", keep=("fp8", "bf16"))
@pytest.mark.parametrize("name", recipe_names())
def test_expected_state_is_the_runs(tiny, text, name):
    """Whatever the recipe, and so are activations; a CPU has its own workspace, for it works in pieces."""
    changes = {"recipe.name": name}
    _, found = step(tiny, text, changes)
    plan = estimate_memory(make_config(tiny(WIDE | changes)))
    assert {c: found.device[c] for c in memory.STATE} == {c: plan.device[c] for c in memory.STATE}
    assert found.parameters == plan.parameters
    if name == "bf16":
        assert {found.device[c] for c in ("weights", "gradients", "m", "v")} == {4 * found.parameters}
    assert found.device["saved activations"] == plan.device["saved activations"]
    assert found.device["logits"] == plan.device["logits"]
    assert plan.peak == pytest.approx(found.peak, rel=0.3)


@pytest.mark.tier("thorough", keep=("fp8",))
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8"])
def test_a_chunked_loss_has_no_logits_and_is_expected_as_it_is(tiny, text, name):
    changes = {"recipe.name": name, "training.chunked_loss": True, "training.micro_batch_size": 2}
    whole = step(tiny, text, changes | {"training.chunked_loss": False})[1]
    found = step(tiny, text, changes)[1]
    plan = estimate_memory(make_config(tiny(WIDE | changes)))
    assert {c: found.device[c] for c in memory.STATE} == {c: plan.device[c] for c in memory.STATE}
    assert found.device["saved activations"] == plan.device["saved activations"]
    assert found.device["logits"] == plan.device["logits"] == 0
    assert whole.device["logits"] > 0
    # In place of the logits the gradient of what the head reads, in fp32, but not of what the head read.
    assert found.device["saved activations"] <= whole.device["saved activations"] + 2 * 32 * 128 * 4


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("place", ["master", "grad", "m", "v"])
def test_what_lies_on_the_host_is_told_apart(tiny, text, place):
    here = step(tiny, text, {"recipe.name": "msamp-o3"})[1]
    there = step(tiny, text, {"recipe.name": "msamp-o3", "recipe.offload": place})[1]
    name = {"grad": "gradients"}.get(place, place)
    assert there.host[name] > 0
    assert there.host[name] + there.device[name] == here.device[name]
    assert set(there.host) == {name}


@pytest.mark.tier("thorough")
def test_the_numbers_are_the_same_wherever_they_lie(train, look):
    narrow = {"recipe.name": "msamp-o3", **WIDE}
    here, there = train("here", narrow), train("there", narrow | {"recipe.offload": "master,grad,m,v"})
    assert look(here).trajectory[0] == look(there).trajectory[0]


@pytest.mark.tier("thorough")
def test_the_run_tells_what_it_took(train, look):
    run = look(train("run", WIDE))
    (event,) = run.events("memory")
    assert set(event["bytes"]) == set(memory.CLASSES)
    assert event["peak"] == sum(event["bytes"].values())
    assert event["expected"]["peak"] == estimate_memory(RunDirectory(run.path).config()).peak


SIZES = {"24GB": 24e9, "22GiB": 22 * 2**30, "500MB": 5e8, "1.5 GB": 1.5e9, "1024B": 1024, "": 0}
NO_UNIT = r"memory size '24' has no unit; write 24GB \(10\^9 bytes\) or 24GiB"  # 24 would be 24 bytes
NO_SIZE = "it must be a number and a unit, such as 24GB or 22GiB"


def test_sizes(tiny):
    assert {size: parse_bytes(size) for size in SIZES} == SIZES
    for size in ("24", "24 gigs", "-1GB", "GB", "1e9x"):
        with pytest.raises(UserError, match=NO_UNIT if size == "24" else NO_SIZE):
            make_config(tiny({"training.memory_limit": size}))


@pytest.mark.parametrize("name", ["msamp-o1", "msamp-o2", "msamp-o3"])
def test_bytes_a_parameter_of_linear_weights(name):
    """FP8-LM's levels: 11, 6 and 7 bytes, scales under one per cent; the rest of the model is fp32."""
    model = {"name": "debug", "vocab_size": 256}
    config = make_config({"model": model, "recipe": {"name": name}, "training": {"batch_size": 8}})
    trainer = Trainer.begin(config, torch.device("meta"))
    linear = [p for p in trainer.model.parameters() if state_of(p).weight is not None]
    kept = [state_of(p).by_place() | trainer.optimizer.moments(p) for p in linear]
    total = sum(t.nbytes for of_one in kept for state in of_one.values() for t in state.tensors.values())
    wanted = {"msamp-o1": 11, "msamp-o2": 6, "msamp-o3": 7}[name]
    assert wanted <= total / sum(p.numel() for p in linear) < wanted * 1.01
    assert recipe(name).state["grad"].prescale


# Two processes divide every dimension and the tokens into multiples of 128, the largest block of a recipe.
MODEL = {"dim": 256, "heads": 2, "kv_heads": 2, "ffn_dim": 512, "layers": 4, "vocab_size": 256}
PIPELINES = [
    ParallelDims(pipeline=4, shard=2),
    ParallelDims(pipeline=2, shard=2, chunks=2),
    ParallelDims(pipeline=2, tensor=2),
]


@pytest.mark.tier("thorough", nightly=2)
@pytest.mark.parametrize("recipe", ["msamp-o2", "bf16"])
@pytest.mark.parametrize("dims", PIPELINES, ids=lambda dims: f"{dims.text} chunks {dims.chunks}")
def test_few_micro_batches_tell_what_all_of_a_pipeline_send_and_keep(recipe, dims):
    values = config_of(recipe, MODEL, 256, batch_size=24 * dims.data)
    estimated = estimate_step(values, dims)
    ranks = (0, dims.size - dims.size // dims.pipeline)
    whole = [simulate_step(values, 12, dims, rank) for rank in ranks]
    heaviest = max(whole, key=lambda step: step.memory.peak)
    assert estimated.memory == heaviest.memory
    assert estimated.sent == heaviest.sent[-1] - heaviest.sent[0]
