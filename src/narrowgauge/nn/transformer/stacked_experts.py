"""Experts whose weights are stacked in one three-dimensional parameter, as in transformers since version 5.

Mixtral, Qwen3-MoE, gpt-oss and others hold the weights of all experts of a layer as `gate_up_proj` [E, N, K]
(gpt-oss: [E, K, N]) and `down_proj`, and call the module with the chosen experts of each token and their
weights. None of its layers is a `torch.nn.Linear`. The module becomes a `StackedExperts`, with the same
parameters under the same names. Each expert becomes two layers, `3.gate_up_proj` and `3.down_proj`, which
multiply with slices of the parameters and have separate places, scales, histories, random bits and gauges.

Tokens are sorted by expert, and results are added in the order of a token's experts, in fp32. An expert
without tokens computes nothing, unless there are no tokens at all: then one does, to produce gradients of
zero.

Legend: M tokens, K inputs, A experts of a token, R = M A assignments.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from narrowgauge.nn.linear import Linear, share_hooks
from narrowgauge.quantization import has_gradient
from narrowgauge.recipes import Recipe
from narrowgauge.system.errors import UserError

GATE = "_apply_gate"  #: the method of transformers' experts that combines the two halves of a layer's result


class StackedExperts(torch.nn.Module):
    """A module of transformers that holds the weights of several experts in one parameter each.

    Attributes:
        source: The class that it had before, which knows the activation.
        num_experts: The number of experts.
        is_transposed: Whether each weight is stored as (inputs, outputs).
        has_gate: Whether the first layer gives two halves, which `GATE` combines.
        slices: The weights of all experts by the name of their parameter, during a forward pass.
    """

    source: type[torch.nn.Module]
    num_experts: int
    is_transposed: bool
    has_gate: bool
    has_post_expert_norm: bool
    post_expert_norm: Any
    slices: Mapping[str, tuple[torch.Tensor, ...]] = MappingProxyType({})

    def use(self, recipe: Recipe, name: str, resolved: Mapping[str, Recipe], first: int, backend: str) -> int:
        """Create the layers of all experts, or recreate them with their existing hooks.

        Args:
            recipe: The recipe of the model.
            name: The name of this module in the model.
            resolved: The recipe of each layer by its name in the model.
            first: The index of its first layer in the model; that after its last is returned.
            backend: The requested backend.
        """
        experts = [torch.nn.Module() for _ in range(self.num_experts)]
        there = dict(self.named_modules())
        for index, (number, layer, _) in enumerate(expert_layers(self), first):
            of_layer = resolved[f"{name}.{number}.{layer}"]
            new = ExpertLinear(self, number, layer, of_layer, index, recipe, backend)
            if (old := there.get(f"{number}.{layer}")) is not None:
                share_hooks(old, new)
            experts[number].add_module(layer, new)
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert.train(self.training))
        return first + 2 * self.num_experts

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, [M, K], in the dtype of the input.

        Args:
            hidden_states: [M, K].
            top_k_index: [M, A], the experts of each token; an index outside 0 to E - 1 is an expert that is
                not on this process and contributes zeros.
            top_k_weights: [M, A].
        """
        M, A = top_k_index.shape
        order_R = top_k_index.flatten().argsort(stable=True)
        sizes = top_k_index.flatten().bincount(minlength=self.num_experts).tolist()
        x_RK = hidden_states.repeat_interleave(A, 0)[order_R]
        names = [name for name, _ in self.named_parameters(recurse=False)]
        self.slices = {name: getattr(self, name).unbind(0) for name in names}
        try:
            found = [self._expert(number, x) for number, x in enumerate(x_RK.split(sizes)) if len(x)]
            found = found or [self._expert(0, x_RK)]
        finally:
            del self.slices
        y_RK = torch.cat(found)[order_R.argsort()]
        weighted_RK = y_RK.float() * top_k_weights.reshape(-1, 1).float()
        return weighted_RK.view(M, A, y_RK.shape[-1]).sum(dim=1).to(hidden_states.dtype)

    def _expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The result of one expert for its tokens."""
        if number >= self.num_experts:
            return torch.zeros_like(x)
        first, last = self.get_submodule(str(number)).children()
        source: Any = torch.nn.Module.__new__(self.source)
        source.__dict__ = self.__dict__
        hidden = first(x)
        hidden = getattr(source, GATE)(hidden) if self.has_gate else source.act_fn(hidden)
        y: torch.Tensor = last(hidden)
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "StackedExperts":
        """Move the parameters before the layers, which ask them for their device."""
        super()._apply(fn, recurse=False)
        for child in self.children() if recurse else ():
            child._apply(fn)
        return self


class ExpertLinear(Linear):
    """A layer of one expert, whose weight and bias are slices of stacked parameters."""

    stack: StackedExperts

    def __init__(
        self,
        stack: StackedExperts,
        number: int,
        name: str,
        recipe: Recipe,
        index: int,
        model_recipe: Recipe,
        backend: str,
    ) -> None:
        """As `Linear`, of an expert by its number, with slices of the parameters `name` and `NAME_bias`."""
        self.__dict__["stack"] = stack  # no submodule
        self.number, self.name = number, name
        rows, columns = stack.get_parameter(name).shape[1:]
        template = torch.nn.Linear(columns, rows, bias=False, device="meta")
        super().__init__(template, recipe, index, stack.is_transposed, model_recipe, backend)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The slice of this expert."""
        return self._slice(self.name)

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """The slice of this expert; None without a bias."""
        return self._slice(f"{self.name}_bias") if hasattr(self.stack, f"{self.name}_bias") else None

    def _slice(self, name: str) -> torch.Tensor:
        return (self.stack.slices[name] if self.stack.slices else self.stack.get_parameter(name))[self.number]

    def _take(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """Do nothing: the stack holds the parameters."""

    def _has_gradient(self) -> bool:
        return has_gradient(self.stack.get_parameter(self.name))

    def _device(self) -> torch.device:
        return self.stack.get_parameter(self.name).device


def stacked(module: torch.nn.Module) -> StackedExperts:
    """Make a module that `is_stacked` a `StackedExperts`; it stays the same object."""
    if not isinstance(module, StackedExperts):
        module.__dict__["source"], module.__class__ = type(module), StackedExperts
    assert isinstance(module, StackedExperts)
    return module


def is_stacked(module: torch.nn.Module) -> bool:
    """Whether a module holds experts as transformers does (which is never imported).

    A module whose forward method was replaced on the instance computes something else.
    """
    if isinstance(module, StackedExperts):
        return True
    if "forward" in vars(module):
        return False
    has_facts = all(
        hasattr(module, fact) for fact in ("num_experts", "has_gate", "is_transposed", "has_post_expert_norm")
    )
    down = getattr(module, "down_proj", None)
    return has_facts and isinstance(down, torch.nn.Parameter) and down.ndim == 3


def expert_layers(module: torch.nn.Module) -> Iterator[tuple[int, str, tuple[int, int]]]:
    """(expert, parameter, (outputs, inputs)) of each layer of a stack of experts, converted or not.

    They are in the order of their random streams.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for number in range(module.num_experts):  # type: ignore[arg-type]
        for key in (first, "down_proj"):
            rows, columns = module.get_parameter(key).shape[1:]
            yield number, key, (columns, rows) if module.is_transposed else (rows, columns)


def require_plain_state(recipe: Recipe, name: str) -> None:
    """Refuse a recipe whose weights, masters or gradients would have to be stored in casts while stacked."""
    states = (recipe.state, *(rule.state for rule in recipe.rules))
    casts = [state.get(place) for state in states for place in ("weight", "master", "grad")]
    if any(cast is not None and cast.name != "fp32" for cast in casts):
        raise UserError(
            f"recipe {recipe.name!r} keeps weights or gradients in casts, and the weights of {name} are "
            "stacked in one parameter for all experts; take a recipe whose weights and gradients are fp32: "
            "fp8, mxfp8, nvfp4, coat and others"
        )
