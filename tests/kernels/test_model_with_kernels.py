"""A model with kernels is the model without them, as far as the rounding of its numbers reaches.

With fp32 inside, the two differ in the order of a few sums and in exponentials: some ulps at each of some
twenty operations one after the other, so 1e-5 of a gradient's norm is wide, and a wrong formula is far above.
With bf16 inside such an ulp of fp32 moves some numbers over the edge between two bf16, by 2^-8 of them; were
it all numbers of all operations, and independently, that would be some 2^-8 * sqrt(20) = 2 %.
"""

import pytest
import torch

from kernels.common import assert_same
from narrowgauge.nn import convert
from narrowgauge.trainer.models import Transformer, initialize, model_config
from support.interpreted import plain_operations

TINY = {"dim": 48, "layers": 2, "heads": 4, "ffn_dim": 40, "vocab_size": 61, "max_sequence_length": 16}
#: A base, its sizes, a recipe, and how near.
MODELS = {
    "llama": ("debug", TINY | {"kv_heads": 2}, None, 1e-5),
    "gpt2": ("gpt2-debug", TINY, None, 1e-5),
    "gpt2 in bf16": ("gpt2-debug", TINY, "bf16", 2e-2),
}
DOCUMENTS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], list(range(9))])


def loss_and_gradients(model, position_BT, device):
    x_BT, y_BT = (
        torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(s)).to(device) for s in (0, 1)
    )
    model.zero_grad()
    loss = model.loss(x_BT, y_BT, position_BT)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.tier("nightly", keep=("llama", "gpt2"))
@pytest.mark.tier("thorough")  # each kernel has its own test in the interpreter
@pytest.mark.filterwarnings("ignore:.*overrides the forward pass")
@pytest.mark.parametrize("name", MODELS)
def test_a_models_loss_and_all_gradients(device, name):
    """Also of documents that are kept apart; and with recomputation, which repeats every bit."""
    base, sizes, under, near = MODELS[name]
    model = Transformer(model_config(base, **sizes), torch.bfloat16 if under else torch.float32)
    initialize(model, 0)
    for n, p in model.named_parameters():
        if "norm" in n or n.endswith("bias"):
            torch.nn.init.normal_(p, 1 if n.endswith("weight") else 0, 0.2)
    model = convert(model.to(device), under) if under else model.to(device)
    for position_BT in (None, DOCUMENTS.to(device)):
        model.recompute = 0
        found = loss_and_gradients(model, position_BT, device)
        with plain_operations():
            expected = loss_and_gradients(model, position_BT, device)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            off = torch.linalg.vector_norm(a.double() - b.double())
            assert off <= near * torch.linalg.vector_norm(b.double()), i
        model.recompute = 1
        assert_same(loss_and_gradients(model, position_BT, device), found)
