"""Silent corruption: a flipped bit is seen, in a replica and in a step that is computed twice."""

from contextlib import nullcontext

import pytest
import torch

from narrowgauge.trainer.training import Corrupted, make_config
from narrowgauge.trainer.training.step.step_faults import (
    fingerprint,
    require_same_replicas,
)
from narrowgauge.trainer.training.step.trainer import Trainer

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_always_seen(dtype):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (6 * dtype.itemsize * 5,), dtype=torch.uint8, generator=generator)
    before = fingerprint({"model": {"w": raw.view(dtype).view(5, 6)}})
    for at in range(8 * len(raw)):
        flipped = raw.clone()
        flipped[at // 8] ^= 1 << at % 8
        assert fingerprint({"model": {"w": flipped.view(dtype).view(5, 6)}}) != before


def test_shards_add_up_and_order_is_no_matter():
    x = torch.randn(10, 7)
    whole = fingerprint({"": {"x": x}})[" x"]
    assert sum(fingerprint({"": {"x": part}})[" x"] for part in x.split(3)) == whole
    assert fingerprint({"": {"x": x.T}})[" x"] == whole
    assert fingerprint({"": {"x": x[:0]}})[" x"] == 0
    assert fingerprint({"": {"x": torch.tensor(1.0)}})[" x"] == 0x3F800000


@pytest.mark.parametrize("name", ["model blocks.1.down.weight", "optimizer blocks.0.qkv.weight.v.values"])
def test_a_replica_that_differs_is_named(tiny, name):
    config = make_config(tiny({"recipe.name": "fp32"}))
    trainers = [Trainer.begin(config, CPU) for _ in range(3)]
    group, _, tensor = name.partition(" ")
    bits = trainers[1].tensors()[group][tensor].detach().view(-1).view(torch.int32)
    bits[11] ^= 1 << 20
    prints = [fingerprint(trainer.tensors()) for trainer in trainers]
    for held in (prints, [*prints, {}]):
        with pytest.raises(Corrupted, match=f"after step 7 the replicas differ in {name}, on rank 1:"):
            require_same_replicas(held, 7)
    require_same_replicas([prints[0], prints[2]], 7)
    with pytest.raises(Corrupted, match="on ranks 0, 1:"):  # of two it is unknown which
        require_same_replicas(prints[:2], 7)


def flip_once(trainer, call):
    """One bit of one gradient is wrong when it is computed for the `call`-th time."""
    calls = []

    def hook(g):
        calls.append(g)
        if len(calls) == call:
            g = g.clone()
            g.view(-1).view(torch.int32)[3] ^= 1 << 20
        return g

    trainer.model.blocks[1].gate_up.weight.register_hook(hook)


@pytest.mark.parametrize(("call", "is_seen"), [(3, True), (6, True), (2, False)])
def test_a_step_that_comes_out_otherwise_the_second_time(begin, call, is_seen):
    """Two micro-batches a step; of the steps 1, 2 and 3, only the second is computed twice."""
    trainer, batches = begin({"recipe.name": "fp8", "guard.replay_every": 2})
    flip_once(trainer, call)
    trainer.train_step(batches)
    words = r"step 2 .*the gradient of blocks\.1\.gate_up\.weight differs"
    with pytest.raises(Corrupted, match=words) if is_seen else nullcontext():
        trainer.train_step(batches)
    assert trainer.step == (1 if is_seen else 2), "nothing was made of it"


@pytest.mark.tier("thorough")
def test_a_corrupted_run_ends_without_another_save(with_trainer, train, look, tmp_path):
    with_trainer(lambda trainer: flip_once(trainer, 9))
    with pytest.raises(Corrupted):
        train(changes={"guard.replay_every": 4, "checkpoint.every": 1})
    assert look(tmp_path / "run").events("save")[-1]["step"] == 3
    assert look(tmp_path / "run").status["status"] == "failed"
