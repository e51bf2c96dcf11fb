"""The two forward passes of a block whose activations are recomputed: what of them needs no work.

A checkpoint (`torch.utils.checkpoint`) keeps the input of a block. In the backward pass it runs the forward
pass again, for the tensors that the operations of the block keep. So nobody reads

    of the first pass     what an operation would make for its backward pass only (`is_discarding`)
    of the second pass    the last product of the block, which is the block's output (`is_unread`)

Gradients stay the same bit for bit. A pass that is recomputed runs in a thread of autograd, so what is said
here holds for a thread. Compiled code asks nothing of this: its compiler decides.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class _Pass(threading.local):
    """The position of a thread: the pass of a checkpoint, and whether it is at a block's last product."""

    number = 0
    is_last_product = False


_pass = _Pass()


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first and of the second pass of one checkpoint, for its `context_fn`."""
    return _within(1), _within(2)


@contextmanager
def _within(number: int) -> Iterator[None]:
    before, _pass.number = _pass.number, number
    try:
        yield
    finally:
        _pass.number = before


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
