"""The base of this package's autograd functions, which have a first derivative only.

A backward pass under a recipe rounds its operands, and what rounds has no derivative. Left alone, torch would
take its result for a constant wherever the gradient of the output has no graph, and a Hessian would be zero.
So the backward pass refuses as soon as torch is to record it (`create_graph=True`), and every transform of
`torch.func`, which would have to record or to batch it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import has_tangent, is_batched, is_transformed


class FirstOrderFunction(torch.autograd.Function):
    """An autograd function that is differentiated once, by `backward`; anything else raises a `UserError`."""

    def __init_subclass__(cls) -> None:
        cls.backward = staticmethod(_once(cls.backward))  # type: ignore[method-assign]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call `forward`, outside the transforms of `torch.func`."""
        if is_transformed() or has_tangent(args):  # torch.compile does not trace a Function with a `jvp`
            refuse_transforms()
        return super().apply(*args)


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise UserError(
                    "narrowgauge's layers have no second derivative (create_graph=True, as for a gradient "
                    "penalty or a Hessian), because their backward passes round: convert only the modules "
                    "that it does not pass through, or approximate it by the difference of two first "
                    "derivatives"
                )
            is_batch = any(is_batched(dy) for dy in gradients if dy is not None)
            if is_batch or is_transformed() or has_tangent(gradients):
                refuse_transforms()
        return backward(ctx, *gradients)

    return wrapper


def refuse_transforms() -> NoReturn:
    """Refuse a pass inside a transform of `torch.func`, and one whose gradients come in batches."""
    raise UserError(
        "torch.func (grad, vmap, jvp), batched gradients and forward-mode differentiation do not pass "
        "through narrowgauge's layers, because their matmuls round a whole batch: call .backward() or "
        "torch.autograd.grad, with the samples in one batch or one after another"
    )
