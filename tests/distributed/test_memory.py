"""The account of several processes: what is expected of imagined ones is what real ones take, to the byte."""

import pytest

from narrowgauge.distributed import ParallelDims, resolve_dims
from narrowgauge.trainer.simulate import memory
from narrowgauge.trainer.simulate.memory_estimate import estimate_step
from narrowgauge.trainer.training import make_config

CASES = [
    ("msamp-o3", {"shard": 2}),
    ("bf16", {"shard": 2, "expert": 2}),
    ("fp4", {"context": 2}),
    ("bf16", {"tensor": 2}),
    ("bf16", {"shard": 2, "zero": 1}),
    ("bf16", {"replicate": 2}),
    ("fp8", {"shard": 2}),
]


@pytest.mark.tier("thorough", nightly=4)
@pytest.mark.parametrize(("recipe", "parallel"), CASES, ids=str)
def test_two_ranks_take_what_is_expected(ranks, text, recipe, parallel):
    values = {
        "model": {"name": "debug", "dim": 128, "ffn_dim": 256, "layers": 3, "vocab_size": 320},
        "data": {"source": text, "tokenizer": "bytes", "sequence_length": 64},
        "training": {"batch_size": 8, "micro_batch_size": 2},
        "recipe": {"name": recipe},
        "parallel": parallel,
    }
    if "expert" in parallel:  # each token goes to both, as the estimate takes them to be shared out evenly
        values["model"] |= {"experts": 2, "experts_per_token": 2}
    (found, sent), _ = ranks(2, "jobs_training.account", values=values)
    config = make_config(values)
    step = estimate_step(config, resolve_dims(ParallelDims(**config.parallel.model_dump()), 2))
    plan = step.memory
    assert {c: found["bytes"][c] for c in memory.STATE} == {c: plan.device[c] for c in memory.STATE}
    is_same = recipe in ("bf16", "fp8")  # the CPU's kernels take pieces of the others
    assert plan.peak == pytest.approx(found["peak"], rel=0 if is_same else 0.1)
    for purpose in ("gather", "reduce", "activations"):
        assert sum(n for (why, _), n in step.sent.items() if why == purpose) == sent.get(purpose, 0), purpose
