"""The state of a linear layer's weight in a recipe's numbers: weight, master and gradient.

The parameter stays a parameter under its own name, in the dtype of its elements (bf16, fp16, FP8), and its
memory is the first tensor of the narrow weight. The three tensors are in the parameter's record
(`quantization.ParamState`), where the optimizer finds them, and the layer holds the same record: torch copies
a parameter without its attributes, and FSDP2 puts other parameters in its place. Master and gradient may be
in the host's memory (`offload`).

While the micro-batches of one step follow each other, weights do not change and gradients are only summed.
`Accumulation` is what a layer makes of that; the numbers are the same as without it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from narrowgauge.formats import torch_dtype
from narrowgauge.nn.loop_checks import refuse_other_optimizers
from narrowgauge.quantization import (
    Cast,
    GradientState,
    ParamState,
    QuantizedState,
    ensure_state,
    master_or_weight,
    state_of,
)
from narrowgauge.quantization.state.parameter_state import NarrowGradParameter, attach_state
from narrowgauge.torch_compat import has_hooks, version_of

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Accumulation:
    """What a layer may do between the first and the last micro-batch of a step.

    Attributes:
        parameter: The weight to whose waiting gradient a backward pass adds; None leaves it to autograd.
        keeps_codes: Whether the codes of the weight are kept from one micro-batch to the next.
        keeps_both: Whether those of a small weight are kept along both axes.
        kept: The operands that were kept.
    """

    parameter: torch.nn.Parameter | None
    keeps_codes: bool
    keeps_both: bool = False
    kept: dict[Any, Any] = field(default_factory=dict)

    def add(self, dw: torch.Tensor, transposed: bool, factor: torch.Tensor | None = None) -> bool:
        """Add to the gradient that waits, in one pass; False leaves it to autograd. `factor` is 0-dim.

        It reads `dw` as the product wrote it and widens each element, exactly, before the sum. Autograd adds
        where no gradient waits yet, where a hook sees it, and where the sum is in a narrower dtype.
        """
        waiting = None if self.parameter is None else self.parameter.grad
        if self.parameter is None or waiting is None or has_hooks(self.parameter):
            return False
        if torch.promote_types(waiting.dtype, dw.dtype) != waiting.dtype:
            return False
        dw = dw.T if transposed else dw
        if factor is None:
            waiting.add_(dw)
        else:
            waiting.addcmul_(dw, factor)
        return True

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returns, from the first call with this key on."""
        if key not in self.kept:
            self.kept[key] = make()
        made: T = self.kept[key]
        return made


def make_weight_state(
    parameter: torch.nn.Parameter,
    casts: Mapping[str, Cast | None],
    offload: Collection[str] = (),
    local: torch.Tensor | None = None,
) -> ParamState | None:
    """Keep a weight, its master and its gradient in casts, in place of those of another recipe.

    Args:
        parameter: The weight. Its numbers are rounded once, from the widest that exist. It then holds the
            narrow numbers, unless `local` is given.
        casts: The casts of "weight", "master" (None: no master) and "grad".
        offload: Those of "master" and "grad" that are kept in the host's memory.
        local: float32, the local numbers of a parameter that FSDP2 has sharded, which holds none itself.

    Returns:
        The parameter's record; None if weight and gradient are plain fp32 and nothing is kept in casts.
    """
    weight, master, grad = (casts[place] for place in ("weight", "master", "grad"))
    assert weight is not None
    assert grad is not None
    numbers = master_or_weight(parameter) if local is None else local
    if local is None and state_of(parameter).weight is not None:  # it was under another recipe
        parameter.data = numbers
    is_plain = weight.name == grad.name == "fp32"
    if is_plain and not state_of(parameter).by_place():
        return None
    state, shape, device = ensure_state(parameter), numbers.shape, parameter.device
    state.weight = state.master = state.gradient = None
    if weight.name != "fp32":
        state.weight = QuantizedState(shape, weight, device, shard=state.shard)
    if master is not None:
        state.master = QuantizedState(shape, master, device, "master" in offload, state.shard)
    if not numbers.is_meta:
        state.write(numbers)
    if not is_plain:
        state.gradient = GradientState(shape, grad, device, "grad" in offload, state.shard)
    bind(parameter, state, is_sharded=local is not None)
    return None if is_plain else state


def bind(parameter: torch.nn.Parameter, state: ParamState, is_sharded: bool) -> None:
    """Attach a record to a parameter, move it to the parameter's device, and share the weight's memory.

    This is needed again after anything that gave the parameter new memory, or the layer another parameter. A
    parameter that FSDP2 has sharded shares no memory with the narrow weight.
    """
    attach_state(parameter, state)
    if state.gradient is not None and type(parameter) is torch.nn.Parameter:  # none that FSDP2 has sharded
        parameter.__class__ = NarrowGradParameter
    if state.weight is not None:
        refuse_other_optimizers()
    for tensor in state.by_place().values():
        tensor.move(parameter.device)
    if state.weight is not None and not is_sharded:
        stored = next(iter(state.weight.tensors.values()))
        parameter.data = stored.view(torch_dtype(state.weight.cast.element) or stored.dtype)
        state.version = version_of(parameter)
