"""Slices and the plan of who writes what, without any process: against a slow obvious oracle."""

import random
from collections import Counter

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.store.index import LocalTensor, TensorSlice, full_tensor
from narrowgauge.trainer.checkpoint.store.index import require_exact_cover as cover
from narrowgauge.trainer.checkpoint.store.save import describe, make_index


def grid(shape, rng):
    """A random division of a shape: cut in two along a random dimension, again and again."""
    slices = [TensorSlice((0,) * len(shape), shape)]
    for _ in range(rng.randrange(12)):
        s = slices.pop(rng.randrange(len(slices)))
        d = rng.randrange(len(shape))
        at = rng.randint(0, s.size[d])
        for first, last in ((0, at), (at, s.size[d])):
            offset = tuple(o + (first if i == d else 0) for i, o in enumerate(s.offset))
            size = tuple(last - first if i == d else n for i, n in enumerate(s.size))
            slices.append(TensorSlice(offset, size))
    rng.shuffle(slices)
    return slices


def count(shape, slices):
    """How often each element is covered: the oracle."""
    times = torch.zeros(shape, dtype=torch.int64)
    for s in slices:
        times[s.index] += 1
    return times


def test_a_division_covers_and_any_slice_moved_or_lost_does_not():
    rng = random.Random(0)
    for _ in range(300):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        slices = grid(shape, rng)
        cover(shape, slices)
        assert count(shape, slices).eq(1).all()
        s = slices.pop(rng.randrange(len(slices)))
        d = rng.randrange(len(shape))
        moved = TensorSlice(tuple(o + (i == d) for i, o in enumerate(s.offset)), s.size)
        for wrong in ([*slices, moved], slices, [*slices, s, s]):
            if s.numel:
                with pytest.raises(ValueError, match=r"overlap|no slice holds|reaches beyond"):
                    cover(shape, wrong)


def test_a_scalar_is_one_slice():
    one = TensorSlice((), ())
    cover((), [one])
    assert one.overlap(one) == one
    with pytest.raises(ValueError, match="overlap"):
        cover((), [one, one])
    with pytest.raises(ValueError, match="no slice holds 1 of the 1"):
        cover((), [])
    cover((0, 5), [])


def plan(*ranks):
    return make_index([describe({"model": named}) for named in ranks])


def test_what_all_hold_is_spread_evenly_and_what_one_holds_is_its_own():
    big = {f"w{i}": [full_tensor(torch.zeros(100 + i))] for i in range(40)}
    index = plan(big | {"only": [full_tensor(torch.zeros(1000))]}, big, big, big)
    load = Counter()
    for entry in index["model"].values():
        for stored in entry.slices:
            load[stored.file] += stored.numel
    assert index["model"]["only"].slices[0].file == "model-00001-of-00004.safetensors"
    assert max(load.values()) - min(load.values()) <= 140


def test_a_second_name_needs_all_holders_to_say_so():
    x, y = full_tensor(torch.ones(3)), full_tensor(torch.ones(3))
    assert plan({"embed": [x], "head": [x]})["model"]["head"].same_as == "embed"
    assert plan({"embed": [x], "head": [x]}, {"head": [y]})["model"]["head"].same_as is None
    assert plan({"embed": [x]}, {"embed": [y], "head": [y]})["model"]["head"].same_as == "embed"
    other = LocalTensor(x.tensor, (6,), (0,)), LocalTensor(x.tensor, (6,), (3,))
    assert plan({"embed": [x], "longer": list(other)})["model"]["longer"].same_as is None


def whole(*shape, dtype=torch.float32):
    return [full_tensor(torch.zeros(shape, dtype=dtype))]


def at(place):
    return [LocalTensor(torch.zeros(3), (4,), (place,))]


CONTRADICTIONS = [
    ([whole(3), whole(4)], r"'w' of 'model' is .* on different ranks"),
    ([whole(3), whole(3, dtype=torch.float16)], r"'w' of 'model' is .*F16.*F32.* on different ranks"),
    ([at(0), at(1)], r"'w' of 'model' cannot be saved: the slices at \(0,\) and \(1,\) overlap"),
    ([at(2)], r"'w' of 'model' cannot be saved: .* reaches beyond its shape \(4,\)"),
    ([whole(2, dtype=torch.complex128)], r"'w' of 'model' .* one dtype, of F64, F32"),
]


def test_ranks_that_contradict_each_other_are_refused_by_name():
    for ranks, words in CONTRADICTIONS:
        with pytest.raises(UserError, match=words):
            plan(*({"w": held} for held in ranks))
