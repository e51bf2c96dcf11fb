"""Bytes on the wire of whole optimizer steps, to the byte: how many for each element of the weights.

Two ranks send half of what they exchange, and every dimension here is even, so nothing is filled up. The
matrices of the blocks travel as the recipe specifies; embedding, head, biases and norms in fp32.
"""

import pytest

ZERO_1, ZERO_3 = {"shard": 2, "zero": 1}, {"shard": 2}


def others(elements):
    """Everything but the matrices of blocks."""
    return elements["all"] - elements["matrices"]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("recipe", "each"), [("fp8", 1), ("bf16", 2), ("fp32", 4), ("msamp-o2", 2), ("msamp-o3", 1)]
)
def test_gathers_of_weights(ranks, recipe, each):
    """One byte an element under fp8: gathered once where whole weights stay for the backward pass..."""
    for found in ranks(2, "jobs_wire.a_step", recipe=recipe, layout=ZERO_1, micro_batches=2):
        elements = found["elements"]
        assert elements["matrices"] > 60_000
        assert found["sent"]["gather"] == (each * elements["matrices"] + 4 * others(elements)) // 2


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("recipe", "each"), [("fp8", 1), ("fp32", 4)])
def test_gathers_of_weights_that_are_cut_again(ranks, recipe, each):
    """... and forward and backward of each micro-batch where they do not."""
    for found in ranks(2, "jobs_wire.a_step", recipe=recipe, layout=ZERO_3, micro_batches=2):
        elements = found["elements"]
        blocks = each * elements["matrices"] + 4 * (elements["blocks"] - elements["matrices"])
        root = 4 * (elements["all"] - elements["blocks"])
        assert found["sent"]["gather"] == 2 * (2 * blocks + root) // 2


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("recipe", "each"), [("msamp-o2", 1), ("msamp-o1", 1), ("fp8", 4)])
def test_sums_of_gradients_of_replicas(ranks, recipe, each):
    """An all-reduce sends every element twice: one byte under MS-AMP, once a step."""
    for found in ranks(2, "jobs_wire.a_step", recipe=recipe, layout={"replicate": 2}, micro_batches=2):
        elements = found["elements"]
        assert found["sent"]["reduce"] == each * elements["matrices"] + 4 * others(elements)
        assert "gather" not in found["sent"]


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("recipe", "each"), [("msamp-o2", 1), ("fp8", 4)])
@pytest.mark.parametrize(("layout", "times"), [(ZERO_1, 1), (ZERO_3, 2)], ids=["zero 1", "zero 3"])
def test_sums_of_gradients_that_are_cut(ranks, recipe, each, layout, times):
    """Each rank gets its part of the sum only: once a step, or after each micro-batch."""
    for found in ranks(2, "jobs_wire.a_step", recipe=recipe, layout=layout, micro_batches=2):
        elements = found["elements"]
        assert found["sent"]["reduce"] == times * (each * elements["matrices"] + 4 * others(elements)) // 2


@pytest.mark.tier("thorough")  # the next test counts how often they travel
@pytest.mark.parametrize("layout", [{"replicate": 2}, ZERO_3, {"tensor": 2}], ids=str)
def test_scales_are_a_small_part(ranks, layout):
    for recipe in ("fp8", "msamp-o2"):
        (found, _) = ranks(2, "jobs_wire.a_step", recipe=recipe, layout=layout)
        assert found["sent"].get("amax", 0) < 0.02 * sum(found["sent"].values())


@pytest.mark.tier("thorough")
def test_scales_are_agreed_on_together(ranks):
    """Of a block four times: to add up its gradients and to store them, each with what overflowed; once more
    for all state of the optimizer. Weights that travel need one for all of them."""
    blocks = 2
    for recipe, calls in {"msamp-o2": 4 * blocks + 1, "fp8": 1}.items():
        for found in ranks(2, "jobs_wire.a_step", recipe=recipe, layout=ZERO_3):
            assert found["calls"]["amax"] == calls


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("recipe", "size"), [("fp32", 4), ("bf16", 2)])
def test_activations_between_processes_that_share_a_sequence(ranks, recipe, size):
    """In the formats of matmuls; the stream twice in a block under `tensor`, heads under `context`."""
    stream = 32 * 64  # tokens x dim
    (found, _) = ranks(2, "jobs_wire.a_step", recipe=recipe, layout={"tensor": 2})
    # two layers, in each two gathers and two sums, forward and back; half of each is sent
    assert found["sent"]["activations"] == 2 * (2 + 2) * 2 * size * stream // 2
    (found, _) = ranks(2, "jobs_wire.a_step", recipe=recipe, layout={"context": 2})
    # q, k, v and the result, forward and back, of which half is here and half of that goes
    assert found["sent"]["activations"] == 2 * 4 * 2 * size * stream // 2 // 2


def test_stages_send_the_stream_once_forward_and_once_back(ranks):
    for found in ranks(2, "jobs_wire.a_step", recipe="fp8", layout={"pipeline": 2}, micro_batches=2):
        assert found["sent"]["activations"] == 2 * 4 * 32 * 64
