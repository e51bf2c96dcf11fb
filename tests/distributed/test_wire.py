"""Bytes on the wire of whole optimizer steps, to the byte: how many for each element of the weights.

Two ranks send half of what they exchange, and every dimension here is even, so nothing is filled up. The
matrices of the blocks travel as the recipe specifies; embedding, head, biases and norms in fp32.
"""

import pytest
import torch

from distributed.ranks import on_ranks
from narrowgauge.distributed import CommCounter, Mesh, ParallelDims
from narrowgauge.nn import Linear
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.training.config.config import make_config
from narrowgauge.trainer.training.step.trainer import Trainer

CPU = torch.device("cpu")
VOCABULARY, TOKENS, BLOCKS = 64, 32, 2
ZERO_1, ZERO_3, DDP = {"shard": 2, "zero": 1}, {"shard": 2}, {"replicate": 2}

#: Recipe, layout, bytes an element of a matrix: in a gather of weights (None: there is none), in a sum.
CASES = [
    ("fp8", ZERO_1, 1, 4),
    ("msamp-o2", ZERO_3, 2, 1),
    ("msamp-o1", DDP, None, 1),
    ("fp8", ZERO_3, 1, 4),
    ("msamp-o3", ZERO_1, 1, 1),
    ("bf16", ZERO_1, 2, 4),
    ("fp32", ZERO_1, 4, 4),
    ("fp32", ZERO_3, 4, 4),
    ("fp8", DDP, None, 4),
    ("msamp-o2", DDP, None, 1),
]


def a_step(recipe, layout, micro_batches=1):
    """What a later step of a run sends; its matrices' elements, those of blocks, and all."""
    layout = ParallelDims(**layout)
    model = {"name": "gpt2-debug", "dim": 64, "layers": BLOCKS, "heads": 4, "kv_heads": 4, "ffn_dim": 128}
    values = {
        "model": model | {"vocab_size": VOCABULARY, "max_sequence_length": TOKENS},
        "data": {"sequence_length": TOKENS},
        "training": {"batch_size": layout.data * micro_batches, "micro_batch_size": 1, "device": "cpu"},
        "recipe": {"name": recipe},
    }
    trainer = Trainer.begin(make_config(values), CPU, Mesh(layout, CPU))
    ids = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    batches = [Batch(ids[:, :-1], ids[:, 1:], TOKENS)] * micro_batches
    for _ in range(2 if layout.replicate > 1 else 1):  # DDP lays its buckets again after the first
        trainer.train_step(iter(batches))
    with CommCounter() as traffic:
        trainer.train_step(iter(batches))
    blocks = trainer.model.blocks
    matrices = {id(m.weight): m.weight.numel() for m in blocks.modules() if isinstance(m, Linear)}
    every = (sum(p.numel() for p in part.parameters()) for part in (blocks, trainer.model))
    return traffic, sum(matrices.values()), *every


@pytest.mark.tier("thorough", nightly=3)
@pytest.mark.parametrize(("recipe", "layout", "gather", "reduce"), CASES, ids=str)
@on_ranks(2)
def test_weights_and_gradients(recipe, layout, gather, reduce):
    """Two micro-batches. Whole weights that stay are gathered once a step, and gradients summed once.

    Weights that are cut again are gathered forward and backward of each micro-batch (but for the root's), and
    gradients summed after each, where every rank gets its part only. An all-reduce sends every element twice.
    """
    traffic, matrices, blocks, everything = a_step(recipe, layout, micro_batches=2)
    sent = traffic.sent
    assert matrices > 60_000
    each_time = reduce * matrices + 4 * (everything - matrices)
    times = {"gather": 2 * 2, "reduce": 2} if layout == ZERO_3 else {"gather": 1, "reduce": 1}
    assert sent["reduce"] == (each_time if layout == DDP else times["reduce"] * each_time // 2)
    in_blocks = (gather or 0) * matrices + 4 * (blocks - matrices)
    root = 4 * (everything - blocks) * (2 if layout == ZERO_3 else 1)
    expected = None if gather is None else (times["gather"] * in_blocks + root) // 2
    assert sent.get("gather") == expected
    assert sent.get("amax", 0) < 0.02 * sum(sent.values())


@pytest.mark.tier("thorough", nightly=1)
@pytest.mark.parametrize(("recipe", "calls"), [("msamp-o2", 4 * BLOCKS + 1), ("fp8", 1)])
@on_ranks(2)
def test_scales_are_agreed_on_together(recipe, calls):
    """Of a block four times: to add up its gradients and to store them, each with what overflowed; once more
    for all state of the optimizer. Weights that travel need one for all of them."""
    assert a_step(recipe, ZERO_3)[0].calls["amax"] == calls
