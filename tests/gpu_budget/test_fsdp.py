"""What narrow weights cost a process under FSDP2, compared with torch's FSDP2 of bf16 weights."""

from collections import Counter

import pytest

from narrowgauge.models import model_config
from support.fsdp_count import FIRST, NEXT, SCALES, events_of, seconds_of

MODEL, LAYERS, WORLD = "qwen2.5-1.5b", 28, 8


@pytest.mark.tier("thorough")
def test_fsdp_adds_hardly_more_to_fp8_than_plain_fsdp_adds_to_bf16():
    """A step of 524,288 tokens on eight GPUs: four micro-batches of 16 x 1024 tokens each."""
    fp8, fp8_alone, plain, alone = (
        seconds_of(MODEL, recipe, LAYERS, 4, world=world, is_plain=is_plain)
        for recipe, is_plain in (("fp8", False), ("bf16", True))
        for world in (WORLD, 1)
    )
    assert fp8 / (fp8_alone + plain - alone) - 1 <= 0.03
    assert fp8 / plain < 0.78, "fp8 stays as much faster as it is on one GPU"


def test_a_shard_is_read_twice_a_step_by_one_launch_each():
    """Once for its largest magnitude, once for its codes: these are kept while the weight is the same."""
    events = events_of(MODEL, "fp8", 3, world=WORLD)
    weights = 3 * 4  # the layers of a block
    launches = Counter((e.phase, e.name) for e in events)
    assert launches[FIRST, "triton cast_given"] - launches[NEXT, "triton cast_given"] == weights
    assert launches[SCALES, "triton largest"] == weights
    assert sum(e.phase == SCALES for e in events) < weights + 30


def test_the_count_sees_what_fsdp_moves():
    """By hand: shards copied in, gathered weights copied out, gradients copied in, all of one block."""
    two, three = (events_of(MODEL, "bf16", n, world=WORLD, is_plain=True) for n in (2, 3))
    moved = Counter()
    for events, sign in ((three, 1), (two, -1)):
        for e in events:
            moved[e.name] += sign * e.cost.bytes if e.phase == NEXT else 0
    c = model_config(MODEL)
    kv = c.dim * c.kv_heads // c.heads
    block = (c.dim + 2 * kv) * (c.dim + 1) + c.dim * c.dim + 3 * c.dim * c.ffn_dim + 2 * c.dim
    assert moved["_foreach_copy_"] == 2 * (4 + 2) * block / WORLD  # forward and backward, fp32 to bf16
    assert moved["all_gather_copy_in"] == 2 * (2 + 2) * block / WORLD
    assert moved["split_with_sizes_copy"] == 2 * (2 + 2) * block
    assert moved["chunk_cat"] == (2 + 4) * block
