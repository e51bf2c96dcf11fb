"""The refusal of second derivatives, by a sentence.

A backward pass under a recipe rounds its operands, and what rounds has no derivative. Torch's own
`once_differentiable` refuses where the output's gradient has a graph, and treats the result as a constant
where it has none: the penalty on the gradient of `model(x).sum()` would silently lose a term.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from narrowgauge.errors import UserError

Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """The `backward` of an autograd function whose results refuse to be differentiated.

    Args:
        backward: Takes the context and gradients of outputs; returns a gradient or None for each input.

    Returns:
        A function with the same arguments and values. Under `create_graph=True`, a backward pass through its
        results raises a `UserError`.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled()):
            return backward(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results
        is_one = not isinstance(results, tuple)
        refusing = tuple(_refusing(result) for result in ((results,) if is_one else results))
        return refusing[0] if is_one else refusing

    return wrapper


def _refusing(result: torch.Tensor | None) -> torch.Tensor | None:
    return None if result is None else _Refusal.apply(result.detach().requires_grad_())


class _Refusal(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise UserError(
            "narrowgauge's layers have no second derivative (create_graph=True, as for a gradient penalty or "
            "a Hessian), because their backward passes round: convert only the modules that it does not pass "
            "through, or approximate it by the difference of two first derivatives"
        )
