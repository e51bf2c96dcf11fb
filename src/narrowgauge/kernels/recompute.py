"""The two forward passes of a checkpointed block, and the parts of them that can be skipped.

A checkpoint (`torch.utils.checkpoint`) keeps the input of a block. In the backward pass it repeats the
forward pass to obtain the tensors that the block's operations keep. So the following are never read:

    in the first pass     results that an operation needs only for its backward pass (`is_discarding`)
    in the second pass    the last matmul of the block, which is the block's output (`is_unread`)

A small result of the first pass that would be expensive to recompute from large tensors, such as an amax, is
kept between the two (`once`).

Gradients stay the same bit for bit. A recomputed pass runs in an autograd thread, so this state is per
thread. Compiled code does not use it: its compiler decides.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch


class _Pass(threading.local):
    """A thread's position: the pass of a checkpoint, and whether it is at a block's last matmul."""

    number = 0
    is_last_product = False
    kept: Sequence[torch.Tensor] = ()  # by the first pass of the current checkpoint
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
    """The small tensor that `make` returns; in a second pass, the one it returned in the first.

    Both passes of a checkpoint request the same tensors in the same order.
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
