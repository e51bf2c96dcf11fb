"""A linear layer that computes under a recipe.

A `Linear` holds what its three GEMMs (`linear_function.py`) need from one pass to the next: parameters and
the state of the weight, what the recipe fixes, and where training is. It returns the dtype it was given, so
that conversion changes no other part of a model.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.formats import stream_key
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.nn.gemm_context import GemmContext, LayerSpec, StepState, stream_ids
from narrowgauge.nn.linear_function import autocast_disabled, linear_function
from narrowgauge.nn.observer import Observer
from narrowgauge.nn.sharded.gathered_weight import WeightGather
from narrowgauge.nn.sharded.layout import LinearShards
from narrowgauge.nn.weight_state import WeightState
from narrowgauge.quantization import Cast, PreScale
from narrowgauge.recipes import Recipe, choose_backend, device_facts
from narrowgauge.torch_compat import is_in_backward

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NEXT_KEY = 0x9E3779B9 - 2**32  # odd, so that 2^32 calls pass before a key comes again


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` whose three GEMMs compute under a recipe.

    It shares the parameters of the layer it is made from. What depends on the step (random bits, delayed
    scales, rules that wait) follows `nn.set_step`, which a training loop calls. Without it, each forward call
    that records gradients counts as a step (recomputed ones do not). There is no second derivative, because
    rounding has none.

    Attributes:
        recipe: The recipe of this layer.
        index: The number of the layer among the model's, from which its random streams are named.
        spec: What the recipe and the device fix.
        histories: The amax histories of the places with delayed scaling.
        state_at_rest: The state of the weight, if the weight or its gradient is narrow.
        shards: What of the layer lies on this process.
        is_cut: Whether FSDP has sharded the weight.
        gathering: How a sharded weight travels, if not in fp32.
        reduce_prescale: The pre-scaling factor of the gradient on the wire, if the recipe has one.
        observer: What is shown operands and products; attached for a step.
    """

    weight: torch.nn.Parameter
    keys: torch.Tensor | None
    first_sample: torch.Tensor | None

    def __init__(
        self,
        layer: torch.nn.Module,
        recipe: Recipe,
        index: int,
        transposed: bool = False,
        model_recipe: Recipe | None = None,
        backend: str = "auto",
    ) -> None:
        """Take over the weight and bias of a layer.

        Args:
            layer: A `torch.nn.Linear`, a `Linear`, or a Hugging Face `Conv1D`.
            recipe: The recipe of this layer.
            index: The number of the layer among the model's.
            transposed: Whether the weight is stored (K, N).
            model_recipe: The recipe of the model; which hardware computes is decided for all of it.
            backend: The requested backend.
        """
        torch.nn.Module.__init__(self)
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, torch.nn.Parameter)
        assert bias is None or isinstance(bias, torch.nn.Parameter)
        n, k = reversed(weight.shape) if transposed else weight.shape
        self.in_features, self.out_features = k, n
        self.recipe, self.index = recipe, index
        self.model_recipe, self.backend = model_recipe or recipe, backend
        self.spec = LayerSpec(dict(recipe.casts), DTYPES[recipe.compute], recipe.saved, transposed=transposed)
        self.step: int | None = None
        self.step_is_set = False  # by `nn.set_step`
        self.awaits_backward = False
        self.observer: Observer | None = None
        self.shards = LinearShards()
        self.is_sharded = False
        self.gathering: WeightGather | None = None
        operands = [*recipe.casts.items(), *(item for rule in recipe.rules for item in rule.casts.items())]
        casts = [cast for _, cast in operands] + [cast for cast in recipe.state.values() if cast is not None]
        self.is_random = any(c.rounding == "stochastic" or c.signs == "random" for c in casts)
        self.histories = {place: AmaxHistory(cast) for place, cast in operands if cast.history}
        for place, history in self.histories.items():
            self.add_module(place.replace(".", "_"), history)
        self.register_buffer("keys", None, persistent=False)
        self.register_buffer("first_sample", None, persistent=False)
        self.set_weights(weight, bias)

    def set_weights(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """Compute with these parameters, on their device, as before the first step."""
        self.weight, self.bias = weight, bias  # type: ignore[assignment]
        self._choose_backend(self.backend)
        for history in self.histories.values():
            history.reset(weight.device)
        state = WeightState(self.weight, self.recipe.state, self.recipe.offload)
        self.state_at_rest = None if state.is_plain else state
        self.reduce_prescale = PreScale(weight.device, mu=0) if self.recipe.reduce.prescale else None
        self._set_keys(0, 0, 0)

    def set_position(self, seed: int, step: int, first_sample: int, steps: int | None = None) -> None:
        """Be in optimizer step `step` of `steps`, with the batch's first sequence at `first_sample`."""
        if step != self.step:
            self._end_step()
        self.step, self.step_is_set = step, True
        casts = _casts_at(self.recipe, step, steps)
        if casts != self.spec.casts:  # else the same object, so that compiled code stays valid
            self.spec = replace(self.spec, casts=casts)
        self._set_keys(seed, step, first_sample)

    def _set_keys(self, seed: int, step: int, first_sample: int) -> None:
        if self.is_random:
            words = [stream_key(seed, step, i) for i in stream_ids(self.index)]
            self.keys = torch.tensor(words, dtype=torch.int32, device=self.weight.device)
            self.first_sample = torch.tensor(first_sample, device=self.weight.device)

    def _choose_backend(self, requested: str) -> None:
        backend = choose_backend(self.model_recipe, device_facts(self.weight.device), requested)
        self.spec = replace(self.spec, native=backend.name == "native")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Linear":
        """Move to another device, and compute as that can."""
        super()._apply(fn, recurse)
        if self.state_at_rest is not None:
            self.state_at_rest.bind(self.weight)
        if self.reduce_prescale is not None:
            self.reduce_prescale.move(self.weight.device)
        self._choose_backend("emulated" if self.backend == "emulated" else "auto")
        return self

    def _is_recomputing(self) -> bool:
        """Whether this is the second forward pass of an activation checkpoint, within the backward pass.

        A checkpoint of the reentrant kind records no gradients the first time, so its second is the step.
        """
        if torch.compiler.is_compiling():
            return False
        in_backward = is_in_backward()
        is_second = in_backward and self.awaits_backward
        self.awaits_backward = not in_backward
        return is_second

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Tie the parameter of a copy to the copy's state."""
        super().__setstate__(state)
        if self.state_at_rest is not None:
            self.state_at_rest.bind(self.weight)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save a plain weight under its plain name, whatever it is stored in."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.state_at_rest is not None:
            destination[f"{prefix}weight"] = self.state_at_rest.read().detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a plain weight, rounding it to what it is stored in."""
        key, state = f"{prefix}weight", self.state_at_rest
        if state is not None and key in state_dict and state_dict[key].shape == self.weight.shape:
            state.write(state_dict[key])
            state_dict = state_dict | {key: self.weight.detach()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _end_step(self) -> None:
        for history in self.histories.values():
            history.end_step()
        if self.reduce_prescale is not None:
            self.reduce_prescale.end_step()

    def discard_step(self) -> None:
        """Undo what the passes of this step have left behind; see `nn.discard_step`."""
        for history in self.histories.values():
            history.discard_step()
        gradient = None if self.state_at_rest is None else self.state_at_rest.gradient
        if gradient is not None:
            gradient.discard_step()
        if self.reduce_prescale is not None:
            self.reduce_prescale.discard_step()

    @property
    def plain_product(self) -> torch.dtype | None:
        """The dtype in which this layer is nothing but the product with its weight; None if it is more.

        Another function may then compute it from `weight.to(dtype)` (`kernels.head_loss`).
        """
        extras: tuple[object, ...] = (self.bias, self.state_at_rest, self.shards.before, self.shards.after)
        has_scale = self.gathering is not None and self.recipe.gather.is_scaled
        if any(extra is not None for extra in extras) or self.spec.transposed or has_scale:
            return None
        is_narrow = any(cast.name != self.recipe.compute for cast in self.spec.casts.values())
        return None if is_narrow else self.spec.compute

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., K) to (..., N), in the dtype of the input."""
        if self.shards.before is not None:
            input = self.shards.before(input)
        weight = self.weight.T if self.spec.transposed else self.weight
        context = self._gemm_context(input, weight)
        if not input.numel():  # no tokens, no numbers to narrow: zeros, and gradients of zero
            bias = None if self.bias is None else self.bias.to(input.dtype)
            weight = weight if context.weight is None else context.numbers_of(weight).detach()
            return torch.nn.functional.linear(input, weight.to(input.dtype), bias)
        compute = linear_function
        if context.weight is not None and context.weight.gradient is not None:
            # Its backward pass writes a gradient on the side, which no compiled graph can hold.
            compute = torch.compiler.disable(linear_function)
        is_sum = self.shards.after is not None  # then the bias is added to the sum over processes
        with autocast_disabled(input.device.type):
            x_MK = input.reshape(-1, self.in_features)
            y_MN = compute(x_MK, weight, None if is_sum else self.bias, context)
        y = y_MN.view(*input.shape[:-1], self.out_features)
        if self.shards.after is None:
            return y
        y = self.shards.after(y)
        return y if self.bias is None else (y + self.bias).to(y.dtype)

    def _gemm_context(self, input: torch.Tensor, weight_NK: torch.Tensor) -> GemmContext:
        """The context of the GEMMs of this forward pass, which counts as a step if no one sets steps."""
        is_training = torch.is_grad_enabled()
        if is_training and not self.step_is_set and not self._is_recomputing():
            self._end_step()
            if self.keys is not None:  # a new tensor, since a backward pass may need the old one
                self.keys = self.keys + _NEXT_KEY
        first_sample = 0 if self.first_sample is None else self.first_sample
        samples = input.shape[0] if input.ndim > 2 else 1
        return GemmContext(
            self.spec,
            StepState(self.keys, first_sample, self.histories, is_training),
            samples,
            self.shards.tensor_shards(samples, input[..., 0].numel(), *weight_NK.shape),
            None if self.is_sharded else self.state_at_rest,
            self.observer,
        )

    def extra_repr(self) -> str:
        """Torch's description, and the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def _casts_at(recipe: Recipe, step: int, steps: int | None) -> dict[str, Cast]:
    """The casts of a layer's recipe in a step."""
    casts = dict(recipe.casts)
    for rule in recipe.rules:
        if rule.is_for_all and rule.holds(step, steps):
            casts |= rule.casts
    return casts
