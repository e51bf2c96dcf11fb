"""Several processes train as one does: every recipe on every grid, bit-equal operands, losses within 1e-5.

What is compared is exact but for the order of sums, so sums are taken in float64 (`--recipe.compute fp32`,
computed wide): a number that differs is then a mistake, and not a code that a last bit has tipped over. Sums
of gradients over micro-batches and processes stay float32; a code that they tip over in a later step changes
a single element, which with a small learning rate does not grow.
"""

import json
import shutil
from itertools import cycle
from math import inf, isfinite

import pytest

from narrowgauge.recipes import recipe_names
from support.covering import covering, properties_of, representatives

LAYOUTS = {
    "fsdp 2": (2, {}),
    "zero 2": (2, {"zero": 2}),
    "zero 1": (2, {"zero": 1}),
    "ddp 2": (2, {"replicate": 2}),
    "tp 2": (2, {"tensor": 2}),
    "cp 2": (2, {"context": 2}),
    "pp 2": (2, {"pipeline": 2}),
    "fsdp 4": (4, {}),
    "hsdp 2x2": (4, {"replicate": 2, "shard": 2}),
    "tp 2 x fsdp 2": (4, {"tensor": 2, "shard": 2}),
    "cp 2 x fsdp 2": (4, {"context": 2, "shard": 2}),
    "tp 2 x cp 2": (4, {"tensor": 2, "context": 2}),
    "pp 2 x fsdp 2": (4, {"pipeline": 2, "shard": 2}),
    "pp 2 x ddp 2": (4, {"pipeline": 2, "replicate": 2}),
    "pp 2 x tp 2": (4, {"pipeline": 2, "tensor": 2}),
}
EXPERT_LAYOUTS = {
    "ep 2": (2, {"shard": 2, "expert": 2}),
    "ep 2 x fsdp 2": (4, {"shard": 4, "expert": 2}),
    "ep 2 x ddp 2": (4, {"replicate": 2, "shard": 2, "expert": 2}),
    "pp 2 x ep 2": (4, {"pipeline": 2, "shard": 2, "expert": 2}),
}
TWO = ("fsdp 2", "ddp 2", "tp 2", "cp 2", "pp 2")
# Gradients of these are themselves narrow where they rest and travel: each sum is rounded, so it depends on
# how many there are. With wide sums they are as exact as the others.
NARROW_SUMS = ("bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3")
WIDE_SUMS = {"recipe.grad": "fp32", "recipe.reduce": "fp32"}
# Weights that rest in bf16 take a step whole or not at all, by chance. The last bit of a gradient decides in
# about one element of 100,000 a step, and the less often the smaller steps are. Where a block has one of two
# candidates, a number of bf16 that a last bit has tipped over may decide which all 16 numbers have.
BY_CHANCE = {"bf16-sr": {"optimizer.lr": 1e-7}, "nvfp4-4over6": {"optimizer.lr": 1e-7}}


class Parity:
    """One process's figures and tensors, of the case that was asked for last, and how others compare."""

    def __init__(self, ranks, base, directory):
        self.ranks, self.base, self.directory = ranks, base, directory
        self.case, self.alone = "", {}

    def __call__(self, layout, recipe, changes=(), steps=3, alone=1, **how):
        """(what one process returns, what each of several returns), under a recipe with changes.

        One process has micro-batches of `alone` sequences, the others of one.
        """
        world, parallel = LAYOUTS[layout] if isinstance(layout, str) else layout
        values = self.base({"recipe.name": recipe, **dict(changes)})
        how |= {"values": values, "steps": steps, "path": str(self.directory / "alone.safetensors")}
        if alone > 1:
            how["values"] = values | {"training": values["training"] | {"micro_batch_size": alone}}
        if self.case != (case := json.dumps(how, sort_keys=True)):
            self.case, (self.alone,) = case, self.ranks(1, "jobs_parity.alone", **how)
        how["values"] = values | {"parallel": parallel}
        return self.alone, self.ranks(world, "jobs_parity.together", **how)


@pytest.fixture(scope="module")
def parity(ranks, tmp_path_factory):
    directory = tmp_path_factory.mktemp("parity")
    text = directory / "text"
    text.mkdir()
    words = ["narrow", "gauge", "rail", "train", "coal", "steam", "valley", "signal"]
    for i in range(240):  # documents of 5 to 120 bytes
        (text / f"{i:03}.txt").write_text(" ".join(words[(i * j * j + j) % 8] for j in range(1 + i % 20)))

    def base(changes):
        values = {
            "model": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_dim": 64, "vocab_size": 257},
            "data": {"source": str(text), "tokenizer": "bytes", "sequence_length": 64},
            "training": {"steps": 10, "batch_size": 4, "micro_batch_size": 1, "device": "cpu"},
            "optimizer": {"lr": 1e-5},
            "schedule": {"warmup_steps": 2},
            "recipe": {"compute": "fp32"},
        }
        for key, value in changes.items():
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = value
        return values

    yield Parity(ranks, base, directory)
    shutil.rmtree(directory)


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


def check(alone, everyone, bound=1e-5, tensors=1e-3, val=None):
    """Bit-equal operands in the first step; then losses, norms, and what became of weights and moments."""
    unlike = [each["unlike"] for each in everyone]
    assert not any(unlike), unlike
    assert all(each["seen"] for each in everyone)
    return check_sums(alone, everyone, bound, tensors, val)


def check_sums(alone, everyone, bound=1e-5, tensors=1e-3, val=None):
    """Losses, norms, and what became of weights and moments."""
    found = differences(alone, everyone)
    bounds = {"loss": bound, "norm": bound, "val": val or bound, "moved": tensors, "m": tensors, "v": tensors}
    assert {kind: d for kind, d in found.items() if d > bounds[kind]} == {}
    return found


# The recipe without anything special and the one with most run on each axis, the others where they differ.
PAIRS = [(recipe, layout) for recipe in ("fp8", "fp8-delayed", "nvfp4", "quartet") for layout in TWO]
QUICK = [("nvfp4", "tp 2"), ("fp8-delayed", "fsdp 2")]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("recipe", "layout"), PAIRS)
def test_two_processes_train_as_one(parity, recipe, layout):
    check(*parity(layout, recipe))


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


LAST_BIT_OF_A_MEAN = pytest.mark.xfail(
    reason="one mean differs by its last float32 bit, and with it a column"
)


@pytest.mark.tier("thorough")  # the keys of casts, below, quantize whole tensors
@pytest.mark.parametrize("layout", [pytest.param("tp 2", marks=LAST_BIT_OF_A_MEAN), "cp 2"])
def test_means_are_of_all_tokens(parity, layout):
    check(*parity(layout, "bf16", MEANS))


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("layout", ["fsdp 2", "tp 2", "cp 2"])
def test_keys_of_casts_mean_the_global_tensor(parity, layout):
    check(*parity(layout, "bf16", KEYS))


# The choice is of the whole input of the first step, so it shows from the second on.
CHANNELS = {"keep_channels": 0.1, "keep_cast": "mxfp8"}
AGAIN = {"cast": "mxfp4", "rounding": "stochastic", "hadamard": 16}
KEPT = {
    "recipe.fprop.x": {"cast": "mxfp4", **CHANNELS, "keep_steps": 2, "keep_every": 3},
    "recipe.fprop.w": {"cast": "nvfp4", **CHANNELS},
    "recipe.wgrad.dy": {**AGAIN, "keep_cast": "mxfp8"},
    "recipe.wgrad.x": {**AGAIN, "of": "fprop.x", **CHANNELS},
}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("layout", ["fsdp 2", "ddp 2", "tp 2", "cp 2", "pp 2"])
def test_kept_channels_are_those_of_the_global_tensor(parity, layout):
    alone, everyone = parity(layout, "bf16", KEPT)
    check(alone, everyone)
    for told in everyone:
        assert told["chosen"] == {n: t for n, t in alone["chosen"].items() if n in told["chosen"]}
    assert {n for told in everyone for n in told["chosen"]} == set(alone["chosen"])
    assert all(1 <= sum(chosen) <= len(chosen) / 8 for chosen in alone["chosen"].values())


OF_BLOCKS = {
    "recipe.attention.v": {"cast": "nvfp4", "block": 8},
    "recipe.attention.do": {"cast": "nvfp4", "rounding": "stochastic"},
    "recipe.attention.ds": {"element": "e2m1", "block": 16, "scale": "bf16", "rounding": "stochastic"},
    "recipe.stream": "nvfp4",
    "model.kv_heads": 2,
}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("layout", ["fsdp 2", "tp 2", "cp 2", "pp 2"])
def test_attention_and_the_stream_mean_the_global_tensor(parity, layout):
    check(*parity(layout, "fp8-attention", OF_BLOCKS))


GPT_2 = {
    "model.positions": "learned",
    "model.norm": "layer",
    "model.mlp": "gelu",
    "model.bias": True,
    "model.tied_head": True,
    "model.max_sequence_length": 80,
}
DOCUMENTS = {"data.separate_documents": True, "training.micro_batch_size": 2}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("layout", [*TWO, "pp 2 x fsdp 2"])
def test_a_tied_head_learned_positions_and_documents_kept_apart(parity, layout):
    """Micro-batches of two sequences, but in a pipeline, which needs two micro-batches."""
    changes = {"training.batch_size": 8} if "pp" in layout else {}
    check(*parity(layout, "fp8-row", GPT_2 | DOCUMENTS | changes))


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("layout", ["zero 1", "zero 2"])
def test_stages_of_zero_and_heads_that_share_keys(parity, layout):
    check(*parity(layout, "fp4", {"model.kv_heads": 2}))


DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
PARTS = DROPOUT | {"model.qk_norm": True, "model.kv_heads": 4, "training.z_loss": 0.01}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("layout", [*TWO, "tp 2 x cp 2"])
def test_dropout_z_loss_and_the_norm_of_heads(parity, layout):
    """Masks of tokens and of heads, of which each process has some."""
    check(*parity(layout, "fp8-row", PARTS))


EXPERTS = {"model.experts": 4, "model.ffn_dim": 32}


@pytest.mark.tier("thorough")  # test_experts_on_different_processes is quick
@pytest.mark.parametrize(
    ("recipe", "layout", "changes"),
    [
        ("nvfp4", "fsdp 2", {}),
        ("msamp-o2", "fsdp 2", WIDE_SUMS),
        ("fp8-delayed", "ddp 2", {}),
        ("mxfp8", "pp 2", {"training.balance_loss": 0.0}),
    ],
)
def test_experts(parity, recipe, layout, changes):
    """Each process has other tokens for an expert, or none, and all wait for each other."""
    check(*parity(layout, recipe, EXPERTS | changes))


# What a layer sees of a token depends on that token, and in wgrad on others of its sequence: the micro-batch
# does not matter, but for an expert. Its tokens come from two sequences, so blocks along them mix these.
ROWS = {
    "recipe.dgrad.dy": {"cast": "mxfp8", "rounding": "stochastic"},
    "recipe.wgrad.dy": {"cast": "mxfp4", "rounding": "stochastic", "hadamard": 32},
    "recipe.wgrad.x": {"cast": "mxfp4", "hadamard": 32},
    "training.balance_loss": 0.0,
}


EXPERT_PAIRS = [
    ("mxfp8", "ep 2"),
    ("fp8-delayed", "ep 2"),
    ("msamp-o2", "ep 2"),
    ("mxfp8", "ep 2 x fsdp 2"),
    ("fp8-delayed", "ep 2 x ddp 2"),
]
GPT_2_MLP = {"model.mlp": "gelu", "model.bias": True, "training.recompute": True}
OTHER_TEXT = 0.01  # one process validates on batches of two sequences, the others on batches of one


@pytest.mark.tier("thorough")  # test_experts.py compares one layer, to the bit
@pytest.mark.parametrize(("recipe", "layout"), EXPERT_PAIRS)
def test_experts_on_different_processes(parity, recipe, layout):
    """Two processes send each other the tokens that one alone has in a micro-batch of two sequences."""
    changes = {"training.batch_size": 2 if layout == "ep 2" else 4} | (WIDE_SUMS if "msamp" in recipe else {})
    check(*parity(EXPERT_LAYOUTS[layout], recipe, EXPERTS | ROWS | changes, alone=2), val=OTHER_TEXT)


@pytest.mark.tier("thorough")  # test_experts.py compares one layer, to the bit
@pytest.mark.parametrize("layout", ["ep 2", "pp 2 x ep 2"])
def test_wide_experts_on_different_processes(parity, layout):
    """An expert that is not narrow computes the same whichever tokens it has together."""
    changes = {"training.balance_loss": 0.0} if "pp" in layout else {}
    world, parallel = EXPERT_LAYOUTS[layout]
    check_sums(*parity((world, parallel | {"zero": 1}), "bf16", EXPERTS | GPT_2_MLP | changes))


STOCHASTIC = {"cast": "e4m3", "rounding": "stochastic"}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [((2, {"pipeline": 2}), "selective"), ((2, {"pipeline": 2, "chunks": 2}), True), ("fsdp 2", "selective")],
)
def test_recomputed_stages_draw_the_same_random_bits(parity, layout, recompute):
    """Later micro-batches have been begun by then; the chunks of a process take turns as well."""
    changes = {"model.layers": 4, "training.recompute": recompute, "recipe.fprop.x": STOCHASTIC, **DROPOUT}
    check(*parity(layout, "fp8", changes))


UNEVEN = {
    "model.dim": 12,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn_dim": 9,
    "model.vocab_size": 400,
    "data.sequence_length": 32,
    "training.batch_size": 12,
}


@pytest.mark.tier("thorough")  # test_quantized_gather.py has three ranks
@pytest.mark.parametrize("processes", [3, 4])
def test_rows_that_cannot_be_shared_out_evenly(parity, processes):
    """Of 9 rows 3 processes have as many; of 4 the last has none, nor of what belongs to them."""
    check(*parity((processes, {}), "msamp-o2", GPT_2 | UNEVEN | WIDE_SUMS))


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("layout", ["fsdp 2", "tp 2", "pp 2"])
def test_muon_makes_the_whole_momentum_orthogonal(parity, layout):
    """Two sequences, so that gradients are bit-equal: its bfloat16 iteration magnifies any last bit."""
    check(*parity(layout, "mxfp8", {"optimizer.name": "muon", "training.batch_size": 2}))


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("layout", ["tp 2", "tp 2 x fsdp 2"])
def test_narrow_weights_that_every_process_of_a_tensor_group_has(parity, layout):
    """The head: its gradient is stored with it, and is summed over processes that see different tokens."""
    weights = {"recipe.weight": "bf16", "recipe.master": "fp32", "recipe.gather": "bf16"}
    check(*parity(layout, "bf16", weights))


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("layout", ["zero 1", "ddp 2", "pp 2"])
def test_overflow_is_everyones(parity, layout):
    """fp16, its loss scaled so far that gradients overflow: all skip the step, and scale it less."""
    fp16 = {"recipe.compute": "fp16", "model.initial_std": 0.02}
    alone, everyone = parity(layout, "fp16", fp16, steps=4, wide=False, loss_scale=2.0**21)
    for kind, key, value in (("guard", "skips", 2), ("loss_scaling", "scale", 2.0**19)):
        assert [told["state"][kind][key] for told in (alone, *everyone)] == [value] * 3
    check(alone, everyone)


LAST_BIT = [("fsdp 2", 2), ("zero 1", 2), ("ddp 2", 2), ("pp 2", 4)]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("layout", "micro_batches"), LAST_BIT)
def test_what_the_page_promises_to_the_last_bit(parity, layout, micro_batches):
    """In the recipe's own numbers: where two processes add in the order of one (`docs/parallel.md`)."""
    changes = {"recipe.compute": "bf16", "optimizer.lr": 1e-3, "training.batch_size": micro_batches}
    alone, everyone = parity(layout, "fp8", changes, steps=4, wide=False)
    found = differences(alone, everyone)
    assert found.pop("loss") <= (0 if layout == "pp 2" else 2**-23)
    assert set(found.values()) == {0}


def narrow_sums(alone, everyone):
    """Before any sum of gradients the loss is the same; then each rounds, as often as there are sums."""
    found = differences(alone, everyone)
    (first, _), (theirs, _) = everyone[0]["steps"][0], alone["steps"][0]
    assert apart([first], [theirs]) < 1e-6
    assert not any(each["unlike"] for each in everyone)
    assert found["loss"] < 5e-3
    assert found["norm"] < 2e-2
    return found


@pytest.mark.tier("thorough")  # test_quantized_reduce.py compares each sum
@pytest.mark.parametrize("layout", ["fsdp 2", "ddp 2"])
def test_sums_in_narrow_numbers_are_near(parity, layout):
    narrow_sums(*parity(layout, "msamp-o3"))


# whole blocks of 128, and steps so small that five of them tip hardly a code
LARGE = {"model.dim": 256, "model.ffn_dim": 256, "data.sequence_length": 256, "optimizer.lr": 1e-6}


def axes_of(parallel):
    """The axes of a grid; a stage of ZeRO is one."""
    return [f"{axis} {n}" if axis == "zero" else axis for axis, n in (parallel or {"shard": 2}).items()]


# Every recipe, every grid, and every pair of a property of a recipe and an axis of a grid.
COVERING = covering(
    {name: properties_of(name) for name in recipe_names()},
    {layout: axes_of(parallel) for layout, (_, parallel) in LAYOUTS.items()},
)


# Those in which a representative of the recipes or a grid occurs for the first time.
FEWEST = [
    (recipe, layout)
    for number, (recipe, layout) in enumerate(COVERING)
    if recipe in representatives()
    and (recipe not in dict(COVERING[:number]) or layout not in [grid for _, grid in COVERING[:number]])
]

#: Pairs that are not within the bounds, for causes that are not known.
DIFFERS = {
    ("fp4", "pp 2 x tp 2"): pytest.mark.xfail(
        reason="0.3 % of the operands of down are apart by a last float32 bit; all are near 1e-9, of up to 8"
    ),
    ("fp16", "pp 2 x fsdp 2"): pytest.mark.xfail(reason="weights have moved by 2e-3 of their way elsewhere"),
}


@pytest.mark.tier("nightly", keep=FEWEST)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("recipe", "layout"), [pytest.param(*pair, marks=DIFFERS.get(pair, ())) for pair in COVERING]
)
def test_every_recipe_on_every_grid(parity, recipe, layout, record_property):
    sums = WIDE_SUMS if recipe in NARROW_SUMS else {}
    changes = LARGE | sums | BY_CHANCE.get(recipe, {})
    for kind, figure in check(*parity(layout, recipe, changes, steps=5)).items():
        record_property(kind, figure)


@pytest.mark.tier("nightly", keep=4)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("layout", "recipe"), list(zip(LAYOUTS, cycle(NARROW_SUMS), strict=False)))
def test_every_grid_with_narrow_sums(parity, recipe, layout, record_property):
    for kind, figure in narrow_sums(*parity(layout, recipe, LARGE, steps=5)).items():
        record_property(kind, figure)
