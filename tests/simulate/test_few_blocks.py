"""A model of many blocks by models of few: exact for every rule, and for a last group that is not full."""

import pytest

from narrowgauge.distributed import ParallelDims
from narrowgauge.recipes import named_device
from narrowgauge.trainer.simulate import H200, count_step, count_whole, estimate_step, memory_estimate
from narrowgauge.trainer.simulate.few_blocks import few_blocks
from support.runs import config_of

RULE = """
saved = "operand"
fprop = "e4m3"
dgrad = "e4m3"
wgrad = "e4m3"

[[rule]]
modules = [{}]
fprop = "bf16"
dgrad = "bf16"
wgrad = "bf16"
"""


def config(recipe, layers, **training):
    sizes = {"dim": 128, "ffn_dim": 256, "vocab_size": 256, "layers": layers}
    return config_of(recipe, sizes, 64, **training)


@pytest.fixture
def but_for(tmp_path):
    """Writes a recipe whose rule selects layers by these patterns."""

    def write(*patterns):
        path = tmp_path / "mine.toml"
        path.write_text(RULE.format(", ".join(f'"{p}"' for p in patterns)))
        return path

    return write


FEW = [
    (["down"], [2, 3]),
    (["blocks.0.*"], [2, 3]),
    (["blocks.?.down", "blocks.??.down"], [2, 3]),
    (["blocks.*[02468].*"], [2, 3, 4]),
    (["blocks.3.down"], [2, 3, 4, 5]),
    (["blocks.27.*"], [28]),
]


@pytest.mark.parametrize(("patterns", "blocks"), FEW, ids=str)
def test_each_kind_of_block_is_among_the_few(but_for, patterns, blocks):
    parts = few_blocks(config(but_for(*patterns), 28))
    assert [n for n, _ in parts] == blocks
    assert sum(n * weight for n, weight in parts) == pytest.approx(28)


@pytest.mark.parametrize(("layers", "every", "blocks"), [(28, 3, [7, 10]), (13, 2, [5, 7]), (14, 4, [14])])
def test_a_last_group_that_is_not_full_is_among_the_few(layers, every, blocks):
    parts = few_blocks(config("fp8", layers, recompute=True, recompute_every=every))
    assert [n for n, _ in parts] == blocks


@pytest.mark.tier("thorough")
def test_counts_and_memory_are_those_of_all_blocks(but_for, monkeypatch):
    """The blocks of the last rule lie beyond the blocks of the smallest models."""
    h200 = named_device("h200")
    for one in (
        config(but_for("blocks.*[02468].*"), 11),
        config("fp8", 13, recompute=True, recompute_every=2),
    ):
        few, all_blocks = count_whole(one, h200).expected.further, count_step(one, h200).totals(H200).further
        assert (few.launches, few.bytes) == (all_blocks.launches, all_blocks.bytes)
        assert few.flops == pytest.approx(all_blocks.flops)
    wide = config("bf16", 10)
    for one, dims in (
        (config(but_for("blocks.6.*", "blocks.7.*"), 9), {}),
        (wide, {"shard": 2, "zero": 1}),
        (wide, {"pipeline": 2}),
    ):
        quick = estimate_step(one, ParallelDims(**dims))
        with monkeypatch.context() as m:
            m.setattr(memory_estimate, "_parts", lambda c, _: [(c.spec.model.layers, 1.0)])
            slow = estimate_step(one, ParallelDims(**dims))
        for name in ("weights", "gradients", "m", "v", "logits", "saved activations"):
            assert quick.memory.device[name] == slow.memory.device[name], name
        assert quick.memory.peak == pytest.approx(slow.memory.peak, rel=0.03 if dims else 0)
        assert quick.sent == slow.sent
