"""The two forward passes of a checkpointed block, and the parts of them that can be skipped.

A checkpoint (`torch.utils.checkpoint`) keeps the input of a block. In the backward pass it repeats the
forward pass to obtain the tensors that the block's operations keep. So the following are never read:

    in the first pass     results that an operation needs only for its backward pass (`is_discarding`)
    in the second pass    the last matmul of the block, which is the block's output (`is_unread`)

Gradients stay the same bit for bit. A recomputed pass runs in an autograd thread, so this state is per
thread. Compiled code does not use it: its compiler decides.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class _Pass(threading.local):
    """A thread's position: the pass of a checkpoint, and whether it is at a block's last matmul."""

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
    """Mark the last matmul of a block, whose result is the block's output or a term of it."""
    _pass.is_last_product = True
    try:
        yield
    finally:
        _pass.is_last_product = False


def is_unread() -> bool:
    """Whether the next matmul's result is never read: it is a block's last, in its second pass."""
    return not torch.compiler.is_compiling() and _pass.is_last_product and _pass.number == 2


def is_discarding() -> bool:
    """Whether nothing of this pass is kept for a backward pass, because another pass follows."""
    return not torch.compiler.is_compiling() and _pass.number == 1
