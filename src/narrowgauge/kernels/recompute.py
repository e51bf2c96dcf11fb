"""The two forward passes of a block whose activations are recomputed: what of them needs no work.

A checkpoint (`torch.utils.checkpoint`) keeps the input of a block. In the backward pass it runs the forward
pass again, for the tensors that the operations of the block keep. So nobody reads

    of the first pass     what an operation would make for its backward pass only (`is_discarding`)
    of the second pass    the last product of the block, which is the block's output (`is_unread`)

And a small result of the first pass that the second would have to compute again from large tensors, such as a
largest magnitude, is kept between the two (`once`).

Gradients stay the same bit for bit. A pass that is recomputed runs in a thread of autograd, so what is said
here holds for a thread. Compiled code asks nothing of this: its compiler decides.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch


class _Pass(threading.local):
    """The position of a thread: the pass of a checkpoint, and whether it is at a block's last product."""

    number = 0
    is_last_product = False
    kept: Sequence[torch.Tensor] = ()  # by the first pass of the checkpoint that is under way
    read = 0  # of these, by the second


_pass = _Pass()


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first and of the second pass of one checkpoint, for its `context_fn`."""
    kept: list[torch.Tensor] = []
    return _within(1, kept), _within(2, kept)


@contextmanager
def _within(number: int, kept: list[torch.Tensor]) -> Iterator[None]:
    before = _pass.number, _pass.kept, _pass.read
    _pass.number, _pass.kept, _pass.read = number, kept, 0
    try:
        yield
    finally:
        _pass.number, _pass.kept, _pass.read = before


def once(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The small tensor that `make` returns; in a second pass the one that it returned in the first.

    Both passes of a checkpoint ask for the same tensors in the same order.
    """
    if _pass.number == 2:
        _pass.read += 1
        return _pass.kept[_pass.read - 1]
    made = make()
    if isinstance(_pass.kept, list) and _pass.number == 1:
        _pass.kept.append(made)
    return made


@contextmanager
def last_product() -> Iterator[None]:
    """The last product of a block, whose result is the block's output or a term of it."""
    _pass.is_last_product = True
    try:
        yield
    finally:
        _pass.is_last_product = False


def is_unread() -> bool:
    """Whether nobody reads the product that is to be computed: it is a block's last, in its second pass."""
    return not torch.compiler.is_compiling() and _pass.is_last_product and _pass.number == 2


def is_discarding() -> bool:
    """Whether nothing of this pass is kept for a backward pass: another one follows."""
    return not torch.compiler.is_compiling() and _pass.number == 1
