"""Several processes train as one does: every recipe on every grid, bit-equal operands, losses within 1e-5.

What is compared is exact but for the order of sums, so sums are taken in float64 (`--recipe.compute fp32`,
computed wide): a number that differs is then a mistake, and not a code that a last bit has tipped over. Sums
of gradients over micro-batches and processes stay float32; a code that they tip over in a later step changes
a single element, which with a small learning rate does not grow.
"""

import json
from math import inf, isfinite, prod

import pytest

from narrowgauge.recipes import recipe_names
from narrowgauge.trainer.experiment.design import with_keys
from support.covering import covering, properties_of, representatives

LAYOUTS = {
    "fsdp 2": {"shard": 2},
    "zero 2": {"zero": 2},
    "zero 1": {"zero": 1},
    "ddp 2": {"replicate": 2},
    "tp 2": {"tensor": 2},
    "cp 2": {"context": 2},
    "pp 2": {"pipeline": 2},
    "fsdp 4": {"shard": 4},
    "hsdp 2x2": {"replicate": 2, "shard": 2},
    "tp 2 x fsdp 2": {"tensor": 2, "shard": 2},
    "cp 2 x fsdp 2": {"context": 2, "shard": 2},
    "tp 2 x cp 2": {"tensor": 2, "context": 2},
    "pp 2 x fsdp 2": {"pipeline": 2, "shard": 2},
    "pp 2 x ddp 2": {"pipeline": 2, "replicate": 2},
    "pp 2 x tp 2": {"pipeline": 2, "tensor": 2},
}
OTHERS = {
    "fsdp 3": {"shard": 3},
    "pp 2 x chunks 2": {"pipeline": 2, "chunks": 2},
    "ep 2, zero 1": {"shard": 2, "expert": 2, "zero": 1},
    "ep 2 x fsdp 2": {"shard": 4, "expert": 2},
    "ep 2 x ddp 2": {"replicate": 2, "shard": 2, "expert": 2},
}
# Gradients of these are themselves narrow where they rest and travel: each sum is rounded, so it depends on
# how many there are. With wide sums they are as exact as the others.
NARROW_SUMS = ("bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3")
WIDE_SUMS = {"recipe.grad": "fp32", "recipe.reduce": "fp32"}
# Weights that rest in bf16 take a step whole or not at all, by chance. The last bit of a gradient decides in
# about one element of 100,000 a step, and the less often the smaller steps are. Where a block has one of two
# candidates, a number of bf16 that a last bit has tipped over may decide which all 16 numbers have.
BY_CHANCE = {"bf16-sr": {"optimizer.lr": 1e-7}, "nvfp4-4over6": {"optimizer.lr": 1e-7}}


def processes(parallel):
    """How many processes a layout has; what says only a stage of ZeRO has two."""
    axes = ("replicate", "shard", "tensor", "context", "pipeline")
    return prod(parallel.get(axis, 1) for axis in axes) if parallel.keys() - {"zero"} else 2


class Parity:
    """One process's figures and tensors, of the case that was asked for last, and how others compare."""

    def __init__(self, ranks, base, directory):
        self.ranks, self.base, self.directory, self.case, self.alone = ranks, base, directory, None, None

    def __call__(self, layout, recipe, changes=(), steps=3, **how):
        """(what one process returns, what each of several returns), under a recipe with changes.

        There are two blocks only where stages need them.
        """
        parallel = (LAYOUTS | OTHERS)[layout]
        layers = 2 if "pp" in layout or "fsdp" in layout else 1
        values = with_keys(self.base, {"recipe.name": recipe, "model.layers": layers, **dict(changes)})
        how |= {"values": values, "steps": steps, "path": str(self.directory / "alone.safetensors")}
        if self.case != (case := json.dumps(how, sort_keys=True)):
            self.case, (self.alone,) = case, self.ranks(1, "jobs_training.alone", **how)
        how["values"] = values | {"parallel": parallel}
        return self.alone, self.ranks(processes(parallel), "jobs_training.together", **how)


@pytest.fixture(scope="module")
def parity(ranks, tmp_path_factory):
    directory = tmp_path_factory.mktemp("parity")
    (text := directory / "text").mkdir()
    words = ["narrow", "gauge", "rail", "train", "coal", "steam", "valley", "signal"]
    for i in range(240):  # documents of 5 to 120 bytes
        (text / f"{i:03}.txt").write_text(" ".join(words[(i * j * j + j) % 8] for j in range(1 + i % 20)))

    base = {
        "model": {"dim": 64, "heads": 4, "kv_heads": 4, "ffn_dim": 64, "vocab_size": 257},
        "data": {"source": str(text), "tokenizer": "bytes", "sequence_length": 64},
        "training": {"steps": 10, "batch_size": 4, "micro_batch_size": 1, "device": "cpu"},
        "optimizer": {"lr": 1e-5},
        "schedule": {"warmup_steps": 2},
        "recipe": {"compute": "fp32"},
    }
    return Parity(ranks, base, directory)


def apart(ours, theirs):
    """The largest relative difference; where one number is not finite, the other is not."""
    pairs = list(zip(ours, theirs, strict=True))
    assert all(isfinite(a) == isfinite(b) for a, b in pairs), pairs
    return max(abs(a - b) / abs(b) for a, b in pairs if isfinite(b))


def differences(alone, everyone):
    """The largest relative difference of each kind; of tensors in the root of the mean square."""
    told = {json.dumps([each["steps"], each["val"], each["state"]]) for each in everyone}
    assert len(told) == 1, f"ranks disagree: {told}"
    losses, norms = zip(*everyone[0]["steps"], strict=True)
    found = {"loss": apart(losses, [loss for loss, _ in alone["steps"]])}
    found["norm"] = apart(norms, [norm for _, norm in alone["steps"]])
    found["val"] = apart([everyone[0]["val"]], [alone["val"]])
    tensors = {}
    for each in everyone:
        for name, squares in each["apart"].items():
            tensors.setdefault(name, []).append(squares)
    for name, squares in tensors.items():
        difference, expected = (sum(column) for column in zip(*squares, strict=True))
        kind = name.split()[1]
        relative = (difference / expected) ** 0.5 if expected else (inf if difference else 0.0)
        found[kind] = max(found.get(kind, 0.0), relative)
    return found


def check(alone, everyone, bound=1e-5, tensors=1e-3):
    """Bit-equal operands in the first step and channels that are kept; losses, norms, weights and moments."""
    unlike = [each["unlike"] for each in everyone]
    assert not any(unlike), unlike
    assert all(each["seen"] for each in everyone)
    for told in everyone:
        assert told["chosen"] == {n: t for n, t in alone["chosen"].items() if n in told["chosen"]}
    assert {n for told in everyone for n in told["chosen"]} == set(alone["chosen"])
    found = differences(alone, everyone)
    bounds = {"loss": bound, "norm": bound, "val": bound, "moved": tensors, "m": tensors, "v": tensors}
    assert {kind: d for kind, d in found.items() if d > bounds[kind]} == {}


# One of each key of a cast that looks beyond its block, or at numbers of another place.
KEYS = {
    "recipe.fprop.x": {"cast": "nvfp4", "tensor_scale": "row"},
    "recipe.fprop.w": {"element": "e2m1", "block": [8, 8], "scale": "e5m3", "tensor_scale": "tensor"},
    "recipe.dgrad.dy": {
        **{"cast": "nvfp4", "candidates": [6, 4], "choose": "mae"},
        **{"rounding": "stochastic", "scale_rounding": "stochastic"},
    },
    "recipe.dgrad.w": {"cast": "mxfp8", "of": "fprop.w"},
    "recipe.wgrad.dy": {"element": "int4", "block": 16, "scale": "bf16", "scale_rounding": "stochastic"},
    "recipe.wgrad.x": "fprop.x",
}
MEANS = {
    "recipe.fprop.x": {"cast": "nvfp4", "center": "tokens"},
    "recipe.wgrad.dy": {"cast": "mxfp4", "center": "tokens", "rounding": "stochastic"},
}
# The choice is of the whole input of the first step, so it shows from the second on.
CHANNELS = {"keep_channels": 0.1, "keep_cast": "mxfp8"}
AGAIN = {"cast": "mxfp4", "rounding": "stochastic", "hadamard": 16}
KEPT = {
    "recipe.fprop.x": {"cast": "mxfp4", **CHANNELS, "keep_steps": 2, "keep_every": 3},
    "recipe.fprop.w": {"cast": "nvfp4", **CHANNELS},
    "recipe.wgrad.dy": {**AGAIN, "keep_cast": "mxfp8"},
    "recipe.wgrad.x": {**AGAIN, "of": "fprop.x", **CHANNELS},
}
ATTENTION_AND_STREAM = {
    "recipe.attention.v": {"cast": "nvfp4", "block": 8},
    "recipe.attention.do": {"cast": "nvfp4", "rounding": "stochastic"},
    "recipe.attention.ds": {"element": "e2m1", "block": 16, "scale": "bf16", "rounding": "stochastic"},
    "recipe.stream": "nvfp4",
    "model.kv_heads": 2,
}
GPT_2 = {"model.positions": "learned", "model.norm": "layer", "model.mlp": "gelu", "model.bias": True}
GPT_2 |= {"model.tied_head": True, "model.max_sequence_length": 80}
# Micro-batches of two sequences, but in a pipeline, which needs two micro-batches.
DOCUMENTS = {"data.separate_documents": True, "training.micro_batch_size": 2, "training.batch_size": 8}
# Masks of tokens and of heads, of which each process has some.
DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
PARTS = DROPOUT | {"model.qk_norm": True, "training.z_loss": 0.01}
# Each process has other tokens for an expert, or none, and all wait for each other.
EXPERTS = {"model.experts": 4, "model.ffn_dim": 32}
GPT_2_MLP = {"model.mlp": "gelu", "model.bias": True, "training.recompute": True}
STOCHASTIC = {"recipe.fprop.x": {"cast": "e4m3", "rounding": "stochastic"}}
UNEVEN = {
    **{"model.dim": 12, "model.heads": 2, "model.kv_heads": 1, "model.ffn_dim": 9, "model.vocab_size": 400},
    **{"data.sequence_length": 32, "training.batch_size": 12},
}
# Two sequences, so that gradients are bit-equal: its bfloat16 iteration magnifies any last bit.
MUON = {"optimizer.name": "muon", "training.batch_size": 2}
# The head: its gradient is stored with it, and is summed over processes that see different tokens.
NARROW_HEAD = {"recipe.weight": "bf16", "recipe.master": "fp32", "recipe.gather": "bf16"}


def recomputed(how):
    """Later micro-batches have been begun by then; the chunks of a process take turns as well."""
    return {"model.layers": 4, "training.recompute": how, **STOCHASTIC, **DROPOUT}


SMALL = {"model.dim": 32, "model.ffn_dim": 32, "data.sequence_length": 32, "training.batch_size": 1}
STREAM = {"recipe.stream": "nvfp4"}  # whose outer scale is of all tokens


#: What is divided: a recipe, changes, the layout that CI runs and those that run weekly.
FEATURES = {
    "keys of casts": ("bf16", KEYS, ("tp 2", "fsdp 2", "cp 2")),
    "means": ("bf16", MEANS, ("cp 2", "tp 2")),
    "kept channels": ("bf16", KEPT, ("tp 2", "fsdp 2", "ddp 2", "cp 2", "pp 2")),
    "attention": ("fp8-attention", ATTENTION_AND_STREAM, ("cp 2", "fsdp 2", "tp 2", "pp 2")),
    "documents": ("fp8-row", GPT_2 | DOCUMENTS, ("pp 2 x fsdp 2", "ddp 2", "tp 2", "cp 2")),
    "parts": ("fp8-row", PARTS, ("tp 2 x cp 2", "fsdp 2", "ddp 2", "pp 2")),
    "heads that share keys": ("fp4", {"model.kv_heads": 2}, ("zero 2", "zero 1")),
    "experts": ("nvfp4", EXPERTS, ("fsdp 2",)),
    "experts' histories": ("fp8-delayed", EXPERTS, ("ddp 2",)),
    "experts of stages": ("mxfp8", EXPERTS | {"training.balance_loss": 0.0}, ("pp 2",)),
    # bf16: an expert that is not narrow computes the same whichever tokens it has together
    "divided experts": ("bf16", EXPERTS | GPT_2_MLP, ("ep 2, zero 1", "ep 2 x fsdp 2", "ep 2 x ddp 2")),
    "recomputed chunks": ("fp8", recomputed(True), ("pp 2 x chunks 2",)),
    "recomputed in part": ("fp8", recomputed("selective"), ("pp 2", "fsdp 2")),
    "rows": ("msamp-o2", GPT_2 | UNEVEN | WIDE_SUMS, ("fsdp 4", "fsdp 3")),  # of 9 the fourth has none
    "muon": ("mxfp8", MUON, ("fsdp 2", "tp 2", "pp 2")),
    "narrow head": ("bf16", NARROW_HEAD, ("tp 2 x fsdp 2", "tp 2")),
}
LATER = ("experts' histories", "experts of stages", "recomputed in part", "heads that share keys")
LAST_BIT = pytest.mark.xfail(reason="one mean differs by its last float32 bit, and with it a column")
PAIRS = [(name, layout) for name, (_, _, layouts) in FEATURES.items() for layout in layouts]


@pytest.mark.parametrize("layout", ["tp 2", "cp 2"])
def test_one_step_of_a_small_model(parity, layout):
    """Two axes on which a process has a part of each sequence."""
    check(*parity(layout, "fp8", SMALL | STREAM, steps=1))


@pytest.mark.tier("thorough", nightly=[(name, f[2][0]) for name, f in FEATURES.items() if name not in LATER])
@pytest.mark.parametrize(
    ("feature", "layout"), [pytest.param(*p, marks=[LAST_BIT] * (p == ("means", "tp 2"))) for p in PAIRS]
)
def test_what_looks_beyond_its_process_means_the_whole(parity, feature, layout):
    """Numbers, random bits and choices that depend on more than one process has."""
    recipe, changes, _ = FEATURES[feature]
    check(*parity(layout, recipe, changes))


@pytest.mark.tier("thorough", nightly=1)
@pytest.mark.parametrize("layout", ["zero 1", "ddp 2", "pp 2"])
def test_overflow_is_everyones(parity, layout):
    """fp16, its loss scaled so far that gradients overflow: all skip the step, and scale it less."""
    fp16 = {"recipe.compute": "fp16", "model.initial_std": 0.02, "model.layers": 2}
    alone, everyone = parity(layout, "fp16", fp16, steps=4, wide=False, loss_scale=2.0**21)
    for kind, key, value in (("guard", "skips", 2), ("loss_scaling", "scale", 2.0**19)):
        assert [told["state"][kind][key] for told in (alone, *everyone)] == [value] * 3
    check(alone, everyone)


@pytest.mark.tier("thorough", nightly=("fsdp 2", "pp 2"))
@pytest.mark.parametrize("layout", ["fsdp 2", "zero 1", "ddp 2", "pp 2"])
def test_what_the_page_promises_to_the_last_bit(parity, layout):
    """In the recipe's own numbers: where two processes add in the order of one (`docs/parallel.md`)."""
    count = 4 if layout == "pp 2" else 2
    changes = {"recipe.compute": "bf16", "optimizer.lr": 1e-3, "training.batch_size": count}
    found = differences(*parity(layout, "fp8", changes, steps=4, wide=False))
    assert found.pop("loss") <= (0 if layout == "pp 2" else 2**-23)
    assert set(found.values()) == {0}


def axes_of(parallel):
    """The axes of a grid; a stage of ZeRO divides as shards do."""
    return ["shard" if axis == "zero" else axis for axis in parallel]


AXES = {layout: axes_of(parallel) for layout, parallel in LAYOUTS.items()}
# Few recipes and every grid, with every pair of a property of a recipe and an axis; then every recipe.
FEW = covering({name: properties_of(name) for name in recipe_names() if name in representatives()}, AXES)
EVERY = covering({name: properties_of(name) for name in recipe_names()}, AXES)
# Whole blocks of 128, and steps so small that hardly a code tips.
LARGE = {"model.dim": 256, "model.ffn_dim": 256, "data.sequence_length": 256, "optimizer.lr": 1e-6}
#: Pairs that are not within the bounds, for causes that are not known.
DIFFERS = {
    ("fp4", "pp 2 x tp 2"): "0.3 % of the operands of down are apart by a last float32 bit, near 1e-9",
    ("fp16", "pp 2 x fsdp 2"): "weights have moved by 2e-3 of their way elsewhere",
}
MARKS = {pair: pytest.mark.xfail(reason=why) for pair, why in DIFFERS.items()}


@pytest.mark.tier("thorough", nightly=FEW)
@pytest.mark.parametrize(
    ("recipe", "layout"), [pytest.param(*p, marks=MARKS.get(p, ())) for p in dict.fromkeys([*FEW, *EVERY])]
)
def test_every_recipe_on_every_grid(parity, recipe, layout):
    sums = WIDE_SUMS if recipe in NARROW_SUMS else {}
    check(*parity(layout, recipe, LARGE | sums | BY_CHANCE.get(recipe, {})))
