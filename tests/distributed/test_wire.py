"""Bytes on the wire of whole optimizer steps, to the byte: how many for each element of the weights.

Two ranks send half of what they exchange, and every dimension here is even, so nothing is filled up. The
matrices of the blocks travel as the recipe specifies; embedding, head, biases and norms in fp32.
"""

import pytest

ZERO_1, ZERO_3, DDP = {"shard": 2, "zero": 1}, {"shard": 2}, {"replicate": 2}
BLOCKS, STREAM = 2, 32 * 64  # tokens x dim

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


@pytest.mark.tier("nightly", keep=3)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("recipe", "layout", "gather", "reduce"), CASES, ids=str)
def test_weights_and_gradients(ranks, recipe, layout, gather, reduce):
    """Two micro-batches. Whole weights that stay are gathered once a step, and gradients summed once.

    Weights that are cut again are gathered forward and backward of each micro-batch (but for the root's), and
    gradients summed after each, where every rank gets its part only. An all-reduce sends every element twice.
    """
    for found in ranks(2, "jobs_training.a_step", recipe=recipe, layout=layout, micro_batches=2):
        matrices, blocks, everything = (found["elements"][k] for k in ("matrices", "blocks", "all"))
        assert matrices > 60_000
        each_time = reduce * matrices + 4 * (everything - matrices)
        times = {"gather": 2 * 2, "reduce": 2} if layout == ZERO_3 else {"gather": 1, "reduce": 1}
        in_sums = each_time if layout == DDP else times["reduce"] * each_time // 2
        assert found["sent"]["reduce"] == in_sums
        in_blocks = (gather or 0) * matrices + 4 * (blocks - matrices)
        root = 4 * (everything - blocks) * (2 if layout == ZERO_3 else 1)
        expected = None if gather is None else (times["gather"] * in_blocks + root) // 2
        assert found["sent"].get("gather") == expected
        assert found["sent"].get("amax", 0) < 0.02 * sum(found["sent"].values())


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("recipe", "calls"), [("msamp-o2", 4 * BLOCKS + 1), ("fp8", 1)])
def test_scales_are_agreed_on_together(ranks, recipe, calls):
    """Of a block four times: to add up its gradients and to store them, each with what overflowed; once more
    for all state of the optimizer. Weights that travel need one for all of them."""
    for found in ranks(2, "jobs_training.a_step", recipe=recipe, layout=ZERO_3):
        assert found["calls"]["amax"] == calls


#: In the formats of matmuls under `tensor` and `context`; stages send fp32.
ACTIVATIONS = [
    # two gathers and two sums in each block, forward and back; half of each is sent
    ("bf16", {"tensor": 2}, BLOCKS * (2 + 2) * 2 * 2 * STREAM // 2),
    # q, k, v and the result, forward and back, of which half is here and half of that goes
    ("bf16", {"context": 2}, BLOCKS * 4 * 2 * 2 * STREAM // 2 // 2),
    ("fp8", {"pipeline": 2}, 2 * 4 * STREAM),  # two micro-batches, once forward and once back
]


@pytest.mark.tier("thorough", keep=(str({"pipeline": 2}),))
@pytest.mark.parametrize(("recipe", "layout", "sent"), ACTIVATIONS)
def test_activations(ranks, recipe, layout, sent):
    count = 2 if "pipeline" in layout else 1
    for found in ranks(2, "jobs_training.a_step", recipe=recipe, layout=layout, micro_batches=count):
        assert found["sent"]["activations"] == sent
