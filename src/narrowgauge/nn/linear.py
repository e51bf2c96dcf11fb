"""A linear layer that computes under a recipe: three GEMMs in one autograd function.

Legend: M tokens, K inputs, N outputs.

    forward    y_MN  = fprop.x(x_MK)  @ fprop.w(w_NK).T          blocks along K
    backward   dx_MK = dgrad.dy(dy_MN) @ dgrad.w(w_NK)           blocks along N
               dw_NK = wgrad.dy(dy_MN).T @ wgrad.x(x_MK)         blocks along M

Each `place(tensor)` is what the GEMM sees of the tensor in that place's format (`quantization.emulate`).
An operand is quantized again for the backward pass, from high precision, because its blocks lie along
another axis there; where they do not (one scale per tensor, square blocks), the same numbers are used
twice. The layer returns the dtype it was given, so that conversion changes no other part of a model.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.formats import stream_key
from narrowgauge.nn.delayed import History
from narrowgauge.nn.gathered import Gathered, Gathering
from narrowgauge.nn.gauges import Onlooker, evenly
from narrowgauge.nn.gemm import multiply
from narrowgauge.nn.places import Places, stream_ids
from narrowgauge.nn.saved import keep_as_it_is
from narrowgauge.nn.split import Split
from narrowgauge.nn.weights import Weight
from narrowgauge.quantization import Cast, PreScale, estimator_slope
from narrowgauge.recipes import Recipe, choose_backend, device_facts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NEXT_KEY = 0x9E3779B9 - 2**32  # odd, so that 2^32 calls pass before a key comes again


class _ThreeGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, places: Places
    ) -> torch.Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        # What was gathered is gathered again, so that nothing of it is kept.
        ctx.reuses_w = places.shared("fprop.w", "dgrad.w") and not isinstance(w_NK, Gathered)
        x = places.operand(x_MK, "fprop.x", -1, both=needs_dw and places.reuses_x)
        w = places.operand(places.wide(w_NK), "fprop.w", -1, both=needs_dx and ctx.reuses_w)
        y_MN = multiply(x, w, places.compute, fast=True)
        some_x_RM = None
        if places.gauge is not None:
            some_x_RM = evenly(x_MK.T).clone()
            places.gauge.product("fprop.y", y_MN, x_MK, places.wide(w_NK))
        if bias_N is not None:
            y_MN += bias_N.to(y_MN.dtype)  # in place: another tensor of this size costs its memory's pages
        kept, ctx.restore_x = places.keep(x_MK, x)
        kept_w, ctx.restore_w = keep_as_it_is(w) if ctx.reuses_w else ((None, None, None), None)
        needs_w = not ctx.reuses_w or places.casts["fprop.w"].estimator_k or places.gauge is not None
        ctx.save_for_backward(w_NK if needs_w else None, *kept_w, *kept, some_x_RM)
        ctx.places = places
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias_N is None else bias_N.dtype
        return y_MN.to(x_MK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with _as_the_recipe_says(dy_MN.device.type):
            return _backward(ctx, dy_MN)


def _backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    w_NK, *kept = ctx.saved_tensors
    places: Places = ctx.places
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    dx_MK = dw_NK = dbias_N = dy = None
    if ctx.needs_input_grad[0]:
        shared = ctx.needs_input_grad[1] and places.shared("dgrad.dy", "wgrad.dy")
        dy = places.operand(dy_MN, "dgrad.dy", -1, both=shared)
        if ctx.reuses_w:
            w = ctx.restore_w(*kept[:3]).flipped()
        else:
            w = places.operand(places.wide(w_NK), "dgrad.w", 0)
        dx_MK = multiply(dy, w, places.compute).to(x_dtype)
        if places.gauge is not None:
            places.gauge.product("dgrad.dx", dx_MK, dy_MN, places.wide(w_NK).T)
    if ctx.needs_input_grad[1]:
        if dy is not None and places.shared("dgrad.dy", "wgrad.dy"):
            dy = dy.flipped()
        else:
            dy = places.operand(dy_MN, "wgrad.dy", 0)
        x = ctx.restore_x(*kept[3:6])
        x = x.flipped() if places.reuses_x else places.operand(x.values, "wgrad.x", 0)
        # A sum that lacks the tokens of others is not rounded before it is whole.
        is_whole = places.part("wgrad.x") is None
        dw_NK = multiply(dy, x, places.compute if is_whole else torch.float32)
        if places.gauge is not None:
            places.gauge.product("wgrad.dw", dw_NK.T, kept[6], dy_MN.T)
        if places.casts["fprop.w"].estimator_k:
            part = places.part("fprop.w")
            dw_NK = dw_NK * estimator_slope(places.wide(w_NK), places.casts["fprop.w"], -1, part)
        dw_NK = None if places.take_gradient(dw_NK) else dw_NK.to(w_dtype)
    if bias_dtype is not None and ctx.needs_input_grad[2]:
        dbias_N = dy_MN.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx_MK, dw_NK, dbias_N, None


def _as_the_recipe_says(device: str) -> AbstractContextManager[Any]:
    """No autocast: what is computed in what is not its business here (the meta device has none)."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


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
        self.gauge: Onlooker | None = None  # laid on for a step by `nn.gauges`
        self.split = Split()  # what of the layer lies here; the room `distributed` divides it
        self.is_cut = False  # whether FSDP has cut the weight (`nn.shards`),
        self.gathering: Gathering | None = None  # and how it travels, if not in fp32
        every = [*recipe.casts.items(), *(item for rule in recipe.rules for item in rule.casts.items())]
        random_casts = (c for _, c in [*every, *recipe.state.items()] if c is not None)
        self.is_random = any(c.rounding == "stochastic" or c.signs == "random" for c in random_casts)
        self.histories = {place: History(c) for place, c in every if c.history}
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
        state = Weight(self.weight, self.recipe.state, self.recipe.offload)
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

    def _runs_natively(self, wish: str) -> bool:
        return choose_backend(self.whole, device_facts(self.weight.device), wish).name == "native"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Linear":
        """Go to another device, and run there as it can."""
        super()._apply(fn, recurse)
        if self.state_at_rest is not None:
            self.state_at_rest.tie(self.weight)
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
        in_backward = torch._C._current_graph_task_id() != -1
        is_second = in_backward and self.awaits_backward
        self.awaits_backward = not in_backward
        return is_second

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What belongs together is one again after a copy."""
        super().__setstate__(state)
        if self.state_at_rest is not None:
            self.state_at_rest.tie(self.weight)

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

    def forget_step(self) -> None:
        """Be as if the forward and backward passes of this step had not been; see `nn.forget_step`."""
        for history in self.histories.values():
            history.forget_step()
        gradient = None if self.state_at_rest is None else self.state_at_rest.gradient
        if gradient is not None:
            gradient.forget_step()
        if self.reduce_prescale is not None:
            self.reduce_prescale.forget_step()

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
        places = Places(
            self.casts,
            DTYPES[self.recipe.compute],
            self.recipe.saved,
            self.keys,
            0 if self.first_sample is None else self.first_sample,
            samples,
            self.histories,
            is_step,
            self.native,
            None if self.is_cut else self.state_at_rest,
            self.transposed,
            self.gauge,
            self.split.parts(samples, input[..., 0].numel(), *weight.shape),
        )
        if not input.numel():  # no tokens, no numbers to narrow: zeros, and gradients of zero
            bias = None if self.bias is None else self.bias.to(input.dtype)
            weight = weight if places.weight is None else places.wide(weight).detach()
            return torch.nn.functional.linear(input, weight.to(input.dtype), bias)
        three_gemms = _ThreeGemms.apply
        if places.weight is not None and places.weight.gradient is not None:
            # Its backward pass writes a gradient on the side, which no compiled graph can hold.
            three_gemms = torch.compiler.disable(three_gemms)
        x_MK = input.reshape(-1, self.in_features)
        with _as_the_recipe_says(input.device.type):
            own_bias = self.bias if self.split.after is None else None  # of a sum it is added to the sum
            y_MN = three_gemms(x_MK, weight, own_bias, places)
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
