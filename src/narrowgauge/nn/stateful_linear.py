"""The state that a linear layer under a recipe carries from pass to pass, and what torch asks of a module.

parameters      the weight, and its state if the weight or its gradient is narrow
the step        random keys and histories of delayed scales; `begin_pass` hands them to the GEMMs
the device      decides which hardware computes
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch

from narrowgauge.nn.gemm_context import LayerSpec
from narrowgauge.nn.histories import History, history_of
from narrowgauge.nn.loop_checks import count_steps, refuse_fsdp, require_own_numbers
from narrowgauge.nn.observer import Observer
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.nn.sharded.gathered_weight import WeightGather
from narrowgauge.nn.sharded.linear_shards import LinearShards
from narrowgauge.nn.step_state import Stepped, StepState, stream_ids
from narrowgauge.nn.weight_state import Accumulation, bind, make_weight_state
from narrowgauge.quantization import Cast, ParamState, PreScale, has_gradient, like_shard, local_part
from narrowgauge.recipes import Recipe
from narrowgauge.torch_compat import SeesFSDP

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class StatefulLinear(Stepped, SeesFSDP, torch.nn.Linear):
    """A linear layer's recipe, parameters and state; `Linear` computes with them.

    Attributes:
        recipe: The recipe of this layer.
        index: The number of the layer among the model's, from which its random streams are named.
        spec: What the recipe and the device fix.
        histories: What places remember of earlier steps: amax histories, held magnitudes, chosen channels.
        state_at_rest: The state of the weight, if the weight or its gradient is narrow.
        shards: The sharding of the layer over processes.
        sequence_length: The tokens of a sequence, where the input is only some of them, as (tokens, inputs).
        is_sharded: Whether FSDP has sharded the weight.
        gathering: How a sharded weight travels, if not in fp32.
        reduce_prescale: The pre-scaling factor of the gradient on the wire, if the recipe has one.
        observer: Sees all operands and products; attached for a step.
        accumulation: What is the same in all micro-batches of a step; attached for a step (`accumulating`).
    """

    weight: torch.nn.Parameter
    state_at_rest: ParamState | None = None
    keys: torch.Tensor | None
    first_sample: torch.Tensor | None
    sequence_length: int = 0
    accumulation: Accumulation | None = None

    def __init__(
        self,
        layer: torch.nn.Module,
        recipe: Recipe,
        index: int,
        transposed: bool = False,
        model_recipe: Recipe | None = None,
        backend: str = "auto",
    ) -> None:
        """Take over the weight and bias of a layer, and its hooks.

        Args:
            layer: A `torch.nn.Linear`, a `Linear`, or a Hugging Face `Conv1D`.
            recipe: The recipe of this layer.
            index: The number of the layer among the model's.
            transposed: Whether the weight is stored (K, N).
            model_recipe: The recipe of the model, which decides the hardware for all layers.
            backend: The requested backend.
        """
        torch.nn.Module.__init__(self)
        share_hooks(layer, self)
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, torch.nn.Parameter)
        assert bias is None or isinstance(bias, torch.nn.Parameter)
        n, k = reversed(weight.shape) if transposed else weight.shape
        self.in_features, self.out_features = k, n
        self.recipe, self.index = recipe, index
        self.model_recipe, self.backend = model_recipe or recipe, backend
        self.spec = LayerSpec(dict(recipe.casts), DTYPES[recipe.compute], recipe.saved, transposed=transposed)
        self.observer: Observer | None = None
        self.shards = LinearShards()
        self.is_sharded = False
        self.gathering: WeightGather | None = None
        operands = [*recipe.casts.items(), *(item for rule in recipe.rules for item in rule.casts.items())]
        casts = [cast for _, cast in operands] + [cast for cast in recipe.state.values() if cast is not None]
        self.is_random = any(c.is_random or c.signs == "random" for c in casts)
        histories = {place: history for place, cast in operands if (history := history_of(place, cast, k))}
        self.histories: dict[str, History] = histories
        for place, history in self.histories.items():
            self.add_module(place.replace(".", "_"), history)
        self.register_buffer("keys", None, persistent=False)
        self.register_buffer("first_sample", None, persistent=False)
        self.set_weights(weight, bias)
        count_steps(self)

    def set_weights(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """Take these parameters and their device, with the state before the first step."""
        self._take(weight, bias)
        self._choose_backend(self.backend)
        for history in self.histories.values():
            history.reset(self._device())
        self.reduce_prescale = PreScale(self._device(), mu=0) if self.recipe.reduce.prescale else None
        self._set_keys(0, 0, 0)

    def _take(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """Take these parameters, and keep what the recipe says of them."""
        self.weight, self.bias = weight, bias  # type: ignore[assignment]
        self.state_at_rest = make_weight_state(self.weight, self.recipe.state, self.recipe.offload)

    def set_position(self, seed: int, step: int, first_sample: int, *schedule: Any, **options: Any) -> None:
        """As `Stepped.set_position`; the pass may have more sequences than this process."""
        pool = self.shards.pool
        first_sample = pool.first(first_sample) if pool else first_sample
        super().set_position(seed, step, first_sample, *schedule, **options)

    def begin_pass(self) -> StepState:
        """Begin a forward pass; where no loop sets steps, it may begin one (`_is_new_step`)."""
        is_training = self._begin_pass()
        first_sample = 0 if self.first_sample is None else self.first_sample
        return StepState(self.keys, first_sample, self.histories, is_training)

    @property
    def plain_product(self) -> torch.dtype | None:
        """The dtype of a layer that only multiplies with its weight; None for any other layer.

        Another function may compute such a layer from `weight.to(dtype)` (`kernels.head_loss`).
        """
        extras: tuple[object, ...] = (self.bias, self.state_at_rest, self.shards.before, self.shards.after)
        has_scale = self.gathering is not None and self.recipe.gather.is_scaled
        if any(extra is not None for extra in extras) or self.spec.transposed or has_scale:
            return None
        is_narrow = any(cast.name != self.recipe.compute for cast in self.spec.casts.values())
        return None if is_narrow else self.spec.compute

    def extra_repr(self) -> str:
        """Torch's description, the name of the recipe, and whether it keeps this layer wide."""
        is_kept = self.model_recipe.is_narrow and not self.recipe.is_narrow
        kept = f", kept in {self.recipe.compute}" if is_kept else ""
        return f"{super().extra_repr()}, recipe={self.recipe.name}{kept}"

    def _has_gradient(self) -> bool:
        """Whether the gradient of a micro-batch waits for an optimizer."""
        return has_gradient(self.weight)

    def _end_step(self, is_ended: bool = False) -> None:
        for history in () if is_ended else self.histories.values():
            history.end_step()
        if self.reduce_prescale is not None:
            self.reduce_prescale.end_step()

    def _follows_step(self) -> bool:
        return super()._follows_step() or self.reduce_prescale is not None

    def discard_step(self) -> None:
        """Undo what the passes of this step have left behind; see `nn.discard_step`."""
        for history in self.histories.values():
            history.discard_step()
        gradient = None if self.state_at_rest is None else self.state_at_rest.gradient
        if gradient is not None:
            gradient.discard_step()
        if self.reduce_prescale is not None:
            self.reduce_prescale.discard_step()

    def _stream_ids(self) -> list[int]:
        return stream_ids(self.index)

    def _device(self) -> torch.device:
        return self.weight.device

    def _use_rules(self, step: int, steps: int | None, decay: int | None) -> None:
        casts = _casts_at(self.recipe, step, steps, decay)
        if casts != self.spec.casts:  # else the same object, so that compiled code stays valid
            self.spec = replace(self.spec, casts=casts)

    def _choose_backend(self, requested: str) -> None:
        backend = verified_backend(self.model_recipe, self._device(), requested)
        self.spec = replace(self.spec, native=backend.name == "native")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move to another device, and choose its backend; from the meta device, begin anew."""
        blank = [history for history in self.histories.values() if history.is_meta]
        is_blank = self.keys is not None and self.keys.is_meta
        super()._apply(fn, recurse)
        for history in blank:
            history.reset(self._device())
        if is_blank:
            self._set_keys(0, 0, 0)
            self._use_own_samples()
        self._bind()
        if self.reduce_prescale is not None:
            self.reduce_prescale.move(self._device())
        self._choose_backend("emulated" if self.backend == "emulated" else "auto")
        return self

    def accept_fsdp(self) -> None:
        """Refuse torch's own sharding of a narrow weight (`distributed.fsdp` takes the record off first)."""
        refuse_fsdp(None if self.is_sharded else self.state_at_rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Tie the parameter of a copy to the copy's state."""
        super().__setstate__(state)
        self._bind()
        count_steps(self)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save a plain weight under its plain name, whatever it is stored in."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.state_at_rest is not None and self.state_at_rest.weight is not None:
            if not self.is_sharded:
                require_own_numbers(self.weight, self.state_at_rest)
            destination[f"{prefix}weight"] = like_shard(self.state_at_rest.weight.read(), self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a plain weight, rounding it to what it is stored in."""
        key, state = f"{prefix}weight", self.state_at_rest
        fits = key in state_dict and state_dict[key].shape == self.weight.shape
        if state is not None and state.weight is not None and fits:
            state.write(local_part(state_dict[key], self.weight))
            state_dict = state_dict | {key: self.weight.detach()}
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._bind()  # `load_state_dict(assign=True)` made another parameter

    def _bind(self) -> None:
        """Attach the weight's record to the parameter, which may be another one than before."""
        if self.state_at_rest is not None:
            bind(self.weight, self.state_at_rest, self.is_sharded)


def _casts_at(recipe: Recipe, step: int, steps: int | None, decay: int | None) -> dict[str, Cast]:
    """The casts of a layer's recipe in a step."""
    casts = dict(recipe.casts)
    for rule in recipe.rules:
        if rule.is_for_all and rule.holds(step, steps, decay):
            casts |= rule.casts
    return casts


def share_hooks(of: torch.nn.Module, to: torch.nn.Module) -> None:
    """Let the hooks of a module's forward and backward pass be called by another one; their handles hold."""
    for name, hooks in vars(of).items():
        if "hook" in name and ("forward" in name or "backward" in name):
            to.__dict__[name] = hooks
