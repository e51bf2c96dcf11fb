"""A linear layer that computes under a recipe.

It is what surrounds the three GEMMs (`linear_function.py`): whose weight it is and what that is stored in,
where training is, on whose hardware it runs. It returns the dtype it was given, so that conversion changes no
other part of a model.
"""

from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.formats import stream_key
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.nn.gemm_context import GemmContext, stream_ids
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
    scales, rules that wait) is told by a training loop with `nn.set_step`; without that, each forward call
    that records gradients counts as a step (recomputed ones do not). There is no second derivative: rounding
    has none.
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
        whole: Recipe | None = None,
        backend: str = "auto",
    ) -> None:
        """Take over `layer`'s weight and bias; `transposed` if its weight is stored (K, N).

        `backend` is the wish for `whole`, the model's recipe that `recipe` is this layer's part of.
        """
        torch.nn.Module.__init__(self)
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, torch.nn.Parameter)
        assert bias is None or isinstance(bias, torch.nn.Parameter)
        n, k = reversed(weight.shape) if transposed else weight.shape
        self.in_features, self.out_features, self.transposed = k, n, transposed
        self.recipe, self.index = recipe, index
        self.whole, self.backend = whole or recipe, backend
        self.driven = False  # whether `set_step` says where training is
        self.awaits_backward = False
        self.step: int | None = None
        self.gauge: Observer | None = None  # laid on for a step by `nn.gauges`
        self.split = LinearShards()  # what of the layer lies here; the room `distributed` divides it
        self.is_sharded = False  # whether FSDP has cut the weight (`nn.shards`),
        self.gathering: WeightGather | None = None  # and how it travels, if not in fp32
        every = [*recipe.casts.items(), *(item for rule in recipe.rules for item in rule.casts.items())]
        random_casts = (c for _, c in [*every, *recipe.state.items()] if c is not None)
        self.is_random = any(c.rounding == "stochastic" or c.signs == "random" for c in random_casts)
        self.histories = {place: AmaxHistory(c) for place, c in every if c.history}
        for place, history in self.histories.items():
            self.add_module(place.replace(".", "_"), history)
        self.register_buffer("keys", None, persistent=False)
        self.register_buffer("first_sample", None, persistent=False)
        self.casts = dict(recipe.casts)
        self.take(weight, bias)

    def take(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """Compute with these parameters, on their device, from the beginning on."""
        self.weight, self.bias = weight, bias  # type: ignore[assignment]
        self.native = self._runs_natively(self.backend)
        for history in self.histories.values():
            history.reset(weight.device)
        state = WeightState(self.weight, self.recipe.state, self.recipe.offload)
        self.state_at_rest = None if state.is_plain else state
        # Of the gradient on the wire, told of by what sends it (`distributed.reducers`).
        self.reduce_prescale = PreScale(weight.device, mu=0) if self.recipe.reduce.prescale else None
        self._set_keys(0, 0, 0)

    def set_position(self, seed: int, step: int, first_sample: int, steps: int | None = None) -> None:
        """Be in optimizer step `step` of `steps`, with the batch's first sequence at `first_sample`."""
        if step != self.step:
            self._end_step()
        self.driven, self.step = True, step
        if (casts := _casts_at(self.recipe, step, steps)) != self.casts:  # compiled code stays valid
            self.casts = casts
        self._set_keys(seed, step, first_sample)

    def _set_keys(self, seed: int, step: int, first_sample: int) -> None:
        if self.is_random:
            words = [stream_key(seed, step, i) for i in stream_ids(self.index)]
            self.keys = torch.tensor(words, dtype=torch.int32, device=self.weight.device)
            self.first_sample = torch.tensor(first_sample, device=self.weight.device)

    def _runs_natively(self, requested: str) -> bool:
        return choose_backend(self.whole, device_facts(self.weight.device), requested).name == "native"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Linear":
        """Go to another device, and run there as it can."""
        super()._apply(fn, recurse)
        if self.state_at_rest is not None:
            self.state_at_rest.bind(self.weight)
        if self.reduce_prescale is not None:
            self.reduce_prescale.move(self.weight.device)
        self.native = self._runs_natively("emulated" if self.backend == "emulated" else "auto")
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
        """What belongs together is one again after a copy."""
        super().__setstate__(state)
        if self.state_at_rest is not None:
            self.state_at_rest.bind(self.weight)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """A plain weight under its plain name, whatever it is stored in."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.state_at_rest is not None:
            destination[f"{prefix}weight"] = self.state_at_rest.read().detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """The inverse, rounding to what it is stored in."""
        key = f"{prefix}weight"
        if (
            self.state_at_rest is not None
            and key in state_dict
            and state_dict[key].shape == self.weight.shape
        ):
            self.state_at_rest.write(state_dict[key])
            state_dict = state_dict | {key: self.weight.detach()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _end_step(self) -> None:
        for history in self.histories.values():
            history.end_step()
        if self.reduce_prescale is not None:
            self.reduce_prescale.end_step()

    def discard_step(self) -> None:
        """Be as if the forward and backward passes of this step had not been; see `nn.discard_step`."""
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

        Somebody else may then compute it (`kernels.head_loss`), from `weight.to(dtype)`.
        """
        more: tuple[object, ...] = (self.bias, self.state_at_rest, self.split.before, self.split.after)
        has_scale = self.gathering is not None and self.recipe.gather.is_scaled
        if any(part is not None for part in more) or self.transposed or has_scale:
            return None
        if any(cast.name != self.recipe.compute for cast in self.casts.values()):
            return None
        return DTYPES[self.recipe.compute]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., K) to (..., N), in the dtype of the input."""
        if self.split.before is not None:
            input = self.split.before(input)
        is_step = torch.is_grad_enabled()
        if is_step and not self.driven and not self._is_recomputing():
            self._end_step()
            if self.keys is not None:  # a new tensor, since a backward pass may need the old one
                self.keys = self.keys + _NEXT_KEY
        samples = input.shape[0] if input.ndim > 2 else 1
        weight = self.weight.T if self.transposed else self.weight
        places = GemmContext(
            self.casts,
            DTYPES[self.recipe.compute],
            self.recipe.saved,
            self.keys,
            0 if self.first_sample is None else self.first_sample,
            samples,
            self.histories,
            is_step,
            self.native,
            None if self.is_sharded else self.state_at_rest,
            self.transposed,
            self.gauge,
            self.split.parts(samples, input[..., 0].numel(), *weight.shape),
        )
        if not input.numel():  # no tokens, no numbers to narrow: zeros, and gradients of zero
            bias = None if self.bias is None else self.bias.to(input.dtype)
            weight = weight if places.weight is None else places.wide(weight).detach()
            return torch.nn.functional.linear(input, weight.to(input.dtype), bias)
        compute = linear_function
        if places.weight is not None and places.weight.gradient is not None:
            # Its backward pass writes a gradient on the side, which no compiled graph can hold.
            compute = torch.compiler.disable(linear_function)
        x_MK = input.reshape(-1, self.in_features)
        with autocast_disabled(input.device.type):
            own_bias = self.bias if self.split.after is None else None  # of a sum it is added to the sum
            y_MN = compute(x_MK, weight, own_bias, places)
        y = y_MN.view(*input.shape[:-1], self.out_features)
        if self.split.after is None:
            return y
        y = self.split.after(y)
        return y if self.bias is None else (y + self.bias).to(y.dtype)

    def extra_repr(self) -> str:
        """Torch's words and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def _casts_at(recipe: Recipe, step: int, steps: int | None) -> dict[str, Cast]:
    """The casts of a layer's recipe in a step."""
    casts = dict(recipe.casts)
    for rule in recipe.rules:
        if rule.is_for_all and rule.holds(step, steps):
            casts |= rule.casts
    return casts
