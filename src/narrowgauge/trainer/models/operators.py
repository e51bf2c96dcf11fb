"""Operations that torch's compiler must not rewrite: each is one operator of a compiled graph.

Compiled for a CPU, the gradient of an embedding adds the rows of equal ids in the order in which threads
arrive, so two backward passes over one batch differ in their last bits; and compiled cosines differ from
eager ones in their last bits. As operators both compute what eager code does, without a graph break.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from narrowgauge.kernels.dispatch import is_traced


class Embedding(nn.Embedding):
    """An embedding table whose gradient matches eager code in compiled graphs.

    Within `nn.linear.accumulating` its gradient is added to an existing one in the rows of its ids: the whole
    gradient of a large vocabulary, mostly zeros, is neither written nor added.
    """

    accumulation: Any = None  # an `nn.weight.Accumulation`, attached for a step

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids of any shape [...]: [..., D]."""
        if type(self.weight) is nn.Parameter and is_traced():
            rows: Tensor = _lookup(self.weight, ids)
            return rows
        rows = super().forward(ids)
        if self.accumulation is not None and rows.grad_fn is not None and self.accumulation.takes_rows(ids):
            rows.grad_fn.register_prehook(partial(self.accumulation.add_rows, ids))
        return rows


def cos_sin(angles: Tensor) -> Tensor:
    """The cosines and sines of angles: [2, *angles.shape]."""
    return _traced(angles) if is_traced() else _stacked(angles)


def _stacked(angles: Tensor) -> Tensor:
    return torch.stack([angles.cos(), angles.sin()])


_traced = torch.library.custom_op("narrowgauge::cos_sin", _stacked, mutates_args=())
_traced.register_fake(lambda angles: angles.new_empty(2, *angles.shape))


@torch.library.custom_op("narrowgauge::lookup", mutates_args=())
def _lookup(weight_VD: Tensor, ids: Tensor) -> Tensor:
    return functional.embedding(ids, weight_VD)


_lookup.register_fake(lambda weight_VD, ids: weight_VD.new_empty(*ids.shape, weight_VD.shape[1]))


@torch.library.custom_op("narrowgauge::lookup_gradient", mutates_args=())
def _lookup_gradient(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(dy, ids, rows, -1, False)


_lookup_gradient.register_fake(lambda dy, ids, rows: dy.new_empty(rows, dy.shape[-1]))


def _keep_ids(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    weight_VD, ids = inputs
    ctx.save_for_backward(ids)
    ctx.rows = weight_VD.shape[0]


def _backward(ctx, dy):  # type: ignore[no-untyped-def]
    return _lookup_gradient(dy, ctx.saved_tensors[0], ctx.rows), None


_lookup.register_autograd(_backward, setup_context=_keep_ids)
