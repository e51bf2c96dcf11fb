"""A linear layer that computes under a recipe: the module, its state, and what torch asks of a module.

    parameters      the weight, and its state if the weight or its gradient is narrow (`weight.py`)
    the step        random keys and histories of delayed scales (`step_state.py`, `histories.py`)
    the device      decides which hardware computes
    forward         makes the operands of the pass (`operands.py`) and calls the three GEMMs
                    (`linear_function.py`)

A layer returns the dtype of its input, so that conversion changes no other part of a model.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.kernels import quantize
from narrowgauge.kernels.cast import attached_amax
from narrowgauge.nn.gemm import NATIVE
from narrowgauge.nn.histories import History, history_of
from narrowgauge.nn.linear_function import autocast_disabled, linear_function
from narrowgauge.nn.operands import DTYPES, LayerSpec, LinearShards, Operands, weight_values
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.nn.step_state import Conversion, Stepped
from narrowgauge.nn.weight import Accumulation, WeightGather, bind, make_weight_state, send_masters
from narrowgauge.quantization import (
    NarrowTensor,
    ParamState,
    PreScale,
    QTensor,
    has_gradient,
    local_part,
    state_of,
)
from narrowgauge.quantization.state.narrow_tensor import saved_weight
from narrowgauge.quantization.state.parameter_state import wide_moment
from narrowgauge.recipes import GEMM_PLACES, GEMMS, Recipe
from narrowgauge.recipes.resolve import operands_of
from narrowgauge.system.devices import is_gpu
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import SeesFSDP, local_tensor, reshaped


class Linear(Stepped, SeesFSDP, torch.nn.Linear):
    """`torch.nn.Linear` whose three GEMMs compute under a recipe.

    It shares the parameters of the layer it is made from. Everything that depends on the step (random bits,
    delayed scales, rules with a start step) follows `nn.set_step`, which a training loop calls. Otherwise
    each forward call that records gradients draws new random bits (recomputed calls reuse the first ones),
    and delayed scales are updated when an optimizer steps or `nn.step` is called. There is no second
    derivative, because rounding has none.

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
        observer: Reads all operands and results; attached for a step.
        accumulation: What is the same in all micro-batches of a step; attached for a step (`accumulating`).
        calls: The forward passes since conversion, without the passes of compiled code (`audit`).
    """

    weight: torch.nn.Parameter
    state_at_rest: ParamState | None = None
    keys: torch.Tensor | None
    first_sample: torch.Tensor | None
    sequence_length: int = 0
    calls: int = 0
    accumulation: Accumulation | None = None
    is_sharded = False
    gathering: WeightGather | None = None
    can_leave_bias = True  # a kernel behind this layer may add its bias (`kernels.heads`)

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
            recipe: The recipe of this layer; `model_recipe` decides the hardware for all layers.
            index: The number of the layer among the model's.
            transposed: Whether the weight is stored (K, N).
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
        self.shards = LinearShards()
        operands = [(place, cast) for place, cast in operands_of(recipe) if place != "saved"]
        casts = [*(cast for _, cast in operands), *filter(None, recipe.state.values())]
        self.is_random = any(c.is_random or c.signs == "random" for c in casts)
        histories = {place: history for place, cast in operands if (history := history_of(place, cast, k))}
        self.histories: dict[str, History] = histories
        for place, history in histories.items():
            self.add_module(place.replace(".", "_"), history)
        self.register_buffer("keys", None, persistent=False)  # DDP sends it: signs are the same on all
        self.first_sample = None  # no buffer: DDP would give each process those of process 0
        self.set_weights(weight, bias)
        self.join(Conversion(), "")

    def set_weights(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """Take these parameters and their device, with the state before the first step."""
        self._take(weight, bias)
        self._choose_backend(self.backend)
        for history in self.histories.values():
            history.to_empty(device=self._device()).renew()
        self.reduce_prescale = PreScale(self._device(), mu=0) if self.recipe["reduce"].prescale else None
        self.start()

    def _take(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """Take these parameters, with their state."""
        self.weight, self.bias = weight, bias  # type: ignore[assignment]
        self.state_at_rest = make_weight_state(self.weight, self.recipe.state, self.recipe.offload)

    def forward(self, input: torch.Tensor, *, with_bias: bool = True) -> torch.Tensor:
        """(..., K) to (..., N), in the dtype of the input; the bias is added unless another adds it."""
        if not isinstance(input, torch.Tensor) or input.shape[-1:] != (self.in_features,):
            found = f"shape {tuple(input.shape)}" if isinstance(input, torch.Tensor) else type(input).__name__
            raise UserError(f"the input of a layer has {found}: give a tensor (..., {self.in_features})")
        if not torch.compiler.is_compiling():
            self.__dict__["calls"] = self.calls + 1  # a module's own way takes longer than a small launch
        if self.state_at_rest is not None and not self.is_sharded:
            return self._outside_of_graphs(input, with_bias)
        if self.spec.is_wide and self._is_plain(input):
            y_MN = torch.nn.functional.linear(input.reshape(-1, self.in_features), self.weight)
            if with_bias and (bias := self.bias) is not None:
                y_MN.add_(bias.to(y_MN.dtype))  # to the rounded sum, as elsewhere
            return reshaped(y_MN, (*input.shape[:-1], self.out_features))
        return self._forward(input, with_bias)

    def _forward(self, input: torch.Tensor, with_bias: bool) -> torch.Tensor:
        """`forward` by the GEMMs of the recipe."""
        if self.shards.before is not None:
            input = self.shards.before(input)
        weight = self._oriented_weight()
        operands = self.operands(input, weight, attached_amax(input))
        bias: torch.Tensor | None = self.bias if with_bias else None
        if not input.numel():  # no tokens, no values to narrow: zeros, and gradients of zero
            bias = None if bias is None else bias.to(input.dtype)
            return torch.nn.functional.linear(input, weight.to(input.dtype), bias)
        if operands.record is not None:
            send_masters(operands.record)
        is_sum = self.shards.after is not None  # then the bias is added to the sum over processes
        with autocast_disabled(input.device.type):
            x_MK = input.reshape(-1, self.in_features)
            y_MN: torch.Tensor = linear_function(x_MK, weight, None if is_sum else bias, operands)
        y = reshaped(y_MN, (*input.shape[:-1], self.out_features))
        if self.shards.after is None:
            return y
        y = self.shards.after(y)
        return reshaped(y, y.shape) if bias is None else (y + bias).to(y.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _outside_of_graphs(self, input: torch.Tensor, with_bias: bool) -> torch.Tensor:
        """`_forward` of a layer whose state is narrow: its hook rounds gradients, so graphs break here."""
        return self._forward(input, with_bias)

    def _is_plain(self, input: torch.Tensor) -> bool:
        """Whether torch's own matmul, without an autograd function of ours, has the digits of a wide layer.

        That is so in fp32 on a CPU, where nothing is cast, observed, added on the side or shared.
        """
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return False
        weight, shares = self.weight, self.is_sharded or not self.shards.is_whole
        is_fp32 = input.dtype == weight.dtype == self.spec.compute == torch.float32
        is_other = self.state_at_rest is not None or self.follows_step or self.spec.transposed or shares
        is_watched = self.observer is not None or self.accumulation is not None
        is_here = input.device.type == "cpu" and self.in_features > 0 and type(weight) is torch.nn.Parameter
        return is_fp32 and is_here and not (is_other or is_watched)

    @torch.no_grad()
    def forward_weight(self) -> torch.Tensor:
        """The weight's values that the forward matmul multiplies in this step: (N, K), float32."""
        weight_NK, operands = self._weight_pass()
        operand = operands.of(weight_NK, "fprop.w", -1)
        return self.forward_codes().dequantize() if operand.form in NATIVE else operand.values().float()

    @torch.no_grad()
    def forward_codes(self) -> QTensor:
        """The codes and scales of these values, of a cast that has scales."""
        weight_NK, operands = self._weight_pass()
        cast = self.spec.casts["fprop.w"]
        return quantize(weight_NK, cast, -1, operands.quant_context(weight_NK, "fprop.w"))[0]

    def _oriented_weight(self) -> torch.Tensor:
        """The weight as (N, K); in an exported graph its values, because that holds no tensor subclass."""
        weight: torch.Tensor = self.weight
        if torch.compiler.is_exporting() and isinstance(weight, NarrowTensor):
            assert self.state_at_rest is not None
            weight = self.state_at_rest.stored_values().clone()  # an operation, which lifts it as a constant
        return weight.T if self.spec.transposed else weight

    def _weight_pass(self) -> tuple[torch.Tensor, Operands]:
        """The weight as (N, K), and the operands of a forward pass with one token."""
        weight = self._oriented_weight()
        operands = self.operands(weight.new_empty(1, self.in_features), weight)
        return weight_values(weight), operands

    def add_gradient(self, dw_NK: torch.Tensor, factor: torch.Tensor) -> bool:
        """Add dw * factor (0-dim) to the gradient that waits, if this layer may, on a GPU; else False."""
        waiting = self.accumulation if is_gpu(self.weight.device) else None
        return waiting is not None and waiting.add(dw_NK, False, factor)

    def operands(
        self, input: torch.Tensor, weight_NK: torch.Tensor, input_amax: torch.Tensor | None = None
    ) -> Operands:
        """The operands of this forward pass of an input, and of its backward pass."""
        is_training = self.begin_pass()  # it may draw new keys
        samples = input.shape[0] if input.ndim > 2 else 1
        # Some tokens of sequences, as an expert has them, have random bits as if all were there.
        share = Fraction(len(input), self.sequence_length) if self.sequence_length else samples
        accumulation = None if torch.compiler.is_compiling() else self.accumulation
        shards, record = self.shards, self.state_at_rest
        if record is not None and (self.is_sharded or state_of(self.weight) is not record):
            record = None  # `functional_call`, weight norm and the like put a tensor in the parameter's place
        return Operands(
            self.spec,
            is_training,
            self.keys,
            0 if self.first_sample is None else self.first_sample,
            self.histories,
            share,
            {} if shards.is_whole else shards.tensor_shards(samples, input[..., 0].numel(), *weight_NK.shape),
            record,
            accumulation,
            self.observer,
            input_amax,
        )

    def set_position(self, seed: int, step: int, first_sample: int, *schedule: Any) -> None:
        """As `Stepped.set_position`; the pass may have more sequences than this process."""
        first_sample = self.shards.pool * first_sample + self.shards.pool_offset
        super().set_position(seed, step, first_sample, *schedule)

    @property
    def plain_product(self) -> torch.dtype | None:
        """The dtype of a layer that only multiplies with its weight; None for any other layer.

        Another function may compute such a layer from `weight.to(dtype)` (`kernels.head_loss`).
        """
        extras: tuple[object, ...] = (self.bias, self.state_at_rest, self.shards.before, self.shards.after)
        has_scale = self.gathering is not None and self.recipe["gather"].is_scaled
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

    @property
    def memories(self) -> list[History | PreScale]:
        """The histories, and the factor of the gradient on the wire."""
        return [*self.histories.values(), *([] if self.reduce_prescale is None else [self.reduce_prescale])]

    def lost(self, optimizer: torch.optim.Optimizer, is_fresh: bool) -> Iterator[str]:
        """As `Stepped.lost`, with moments that the recipe stores in casts."""
        weight = self._parameters.get("weight")
        if weight is not None and (cast := wide_moment(weight, optimizer, self.recipe.state)):
            yield f"keeps moments in float32, which the recipe stores in {cast.name!r}: use narrowgauge.AdamW"
        yield from super().lost(optimizer, is_fresh)

    def discard_step(self) -> None:
        """As `Stepped.discard_step`, with the gradient in a cast."""
        super().discard_step()
        if self.state_at_rest is not None and self.state_at_rest.gradient is not None:
            self.state_at_rest.gradient.discard_step()

    def weight_tensors(self) -> dict[str, torch.Tensor]:
        """Scales of the weight, its master, and the pre-scaling factor; the tensors themselves."""
        kept = {} if self.state_at_rest is None else self.state_at_rest.tensors()
        factor = {} if self.reduce_prescale is None else self.reduce_prescale.tensors
        return kept | {f"reduce.{name}": t for name, t in factor.items()}

    def _stream_ids(self) -> list[int]:
        operands = [self.index * len(GEMM_PLACES) + i for i in range(len(GEMM_PLACES))]
        signs = [2**32 + self.index * len(GEMMS) + i for i in range(len(GEMMS))]
        return [*operands, *signs, 2**33 + self.index]  # the last one of the gradient

    def _device(self) -> torch.device:
        return self.weight.device

    def _use_rules(self, step: int, steps: int | None, decay: int | None) -> None:
        casts = self.recipe.at(step, steps, decay).casts if self.recipe.rules else self.spec.casts
        if casts != self.spec.casts:  # else the same object, so that compiled code stays valid
            self.spec = replace(self.spec, casts=casts)

    def _choose_backend(self, requested: str) -> None:
        backend = verified_backend(self.model_recipe, self._device(), requested)
        self.spec = replace(self.spec, native=backend.name == "native")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move to another device, and choose its backend; from the meta device, start again."""
        is_blank = self.keys is not None and self.keys.is_meta
        weight: torch.Tensor | None = self._parameters.get("weight")
        if isinstance(weight, NarrowTensor):
            own = self._parameters.pop("weight")
            try:
                super()._apply(fn, recurse)
            finally:
                self._parameters = {"weight": own, **self._parameters}
            probe = fn(torch.empty(0, dtype=weight.dtype, device=weight.device))
            weight.move(probe.device, probe.dtype)
        else:
            super()._apply(fn, recurse)
        if self.first_sample is not None:
            self.first_sample = fn(self.first_sample)
        if is_blank:
            self._set_keys(0, 0, 0)
            self._use_own_samples()
        if not self.takes_other_parameter:
            self._bind()
        if self.reduce_prescale is not None:
            self.reduce_prescale.move(self._device())
        self._choose_backend("emulated" if self.backend == "emulated" else "auto")
        return self

    def accept_fsdp(self) -> None:
        """Refuse torch's own sharding of a weight with a record (`distributed.fsdp` takes it off first).

        FSDP2 cuts a parameter by `chunk`, `new_zeros` and `copy_`, so that its shard holds values without
        codes and masters. A subclass cannot change that by its hooks: they learn of the mesh at the first
        gather, and shards share a scale already when a checkpoint or an initialization writes to them.
        """
        if self.state_at_rest is not None and not self.is_sharded:
            raise UserError(
                "torch's fully_shard does not shard the low-precision state of a weight: call "
                "narrowgauge.fully_shard instead (FSDP2), or use a recipe whose weights and gradients are "
                "fp32: fp8, mxfp8, mxfp4, nvfp4, coat and others"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Tie the parameter of a copy to the copy's state."""
        super().__setstate__(state)
        kept, weight = self.state_at_rest, self._parameters.get("weight")
        if self.takes_other_parameter and kept is not None and weight is not None and not weight.is_meta:
            values = kept.require_weight().read().to(weight.dtype)  # a file holds these of a weight of ours
            if not torch.allclose(weight, values, rtol=0, atol=0, equal_nan=True):
                self.state_at_rest = None
        self._bind()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save a plain weight under its plain name, whatever stores it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (weight := self._own_weight()) is not None:
            destination[f"{prefix}weight"] = saved_weight(weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a plain weight, rounding it to the format that stores it.

        A layer without values that is assigned some (`load_state_dict(assign=True)`) starts again where these
        are, as after `to_empty`.
        """
        key, is_assigned = f"{prefix}weight", rest[0].get("assign_to_params_buffers", False)
        given = state_dict.get(key)
        has_all = all(p is None or prefix + name in state_dict for name, p in self._parameters.items())
        if is_assigned and has_all and given is not None and self.weight.is_meta and not given.is_meta:
            self.to_empty(device=given.device)
        weight, is_replaced = self._own_weight(), self.takes_other_parameter
        if given is not None and given.shape == self.weight.shape:
            local, own = local_part(given, self.weight), local_tensor(self.weight)
            if self.histories and self.has_run and not (own.is_meta or torch.equal(own, local.to(own))):
                for history in self.histories.values():  # of other weights
                    history.renew()
            if weight is not None:
                state_of(weight).load(local)
                state_dict = state_dict | {key: weight.detach()}
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if not is_replaced:
            self._bind()  # `load_state_dict(assign=True)` made another parameter

    def _own_weight(self) -> torch.nn.Parameter | None:
        """The parameter whose weight this layer stores in a cast; None if there is none."""
        weight, state = self._parameters.get("weight"), self.state_at_rest
        is_own = weight is not None and state is not None and state_of(weight) is state
        return weight if is_own and state is not None and state.weight is not None else None

    @property
    def takes_other_parameter(self) -> bool:
        """Whether other code has put another parameter in place of one stored in a cast."""
        has_stored = self.state_at_rest is not None and self.state_at_rest.weight is not None
        return has_stored and self._own_weight() is None

    def _bind(self) -> None:
        """Attach the weight's record to the parameter, which may be another one than before."""
        if self.state_at_rest is not None and (weight := self._parameters.get("weight")) is not None:
            bind(weight, self.state_at_rest, self.is_sharded)
            if self.gathering is not None and isinstance(weight, DTensor):
                self.gathering.parameter = weight


def share_hooks(of: torch.nn.Module, to: torch.nn.Module) -> None:
    """Let the hooks of a module's forward and backward pass be called by another one; their handles hold."""
    for name, hooks in vars(of).items():
        if "hook" in name and ("forward" in name or "backward" in name):
            to.__dict__[name] = hooks


@contextmanager
def accumulating(model: torch.nn.Module, keeps_codes: bool, keeps_both: bool = False) -> Iterator[None]:
    """The micro-batches of one step, whose weights do not change and whose gradients only `backward` sums.

    A layer then adds its weight's gradient to the existing one in one pass, and an embedding adds the rows of
    its ids. On a CPU autograd adds up the gradients of a weight that modules share, in another order.
    `keeps_codes` and `keeps_both` are those of `Accumulation`.
    """
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "accumulation")]
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    try:
        for layer in layers:
            is_added = uses[id(layer.weight)] == 1 or is_gpu(layer.weight.device)
            layer.accumulation = Accumulation(layer.weight if is_added else None, keeps_codes, keeps_both)
        yield
    finally:
        for layer in layers:
            layer.accumulation = None
