"""A linear layer that computes under a recipe.

It returns the dtype of its input, so that conversion changes no other part of a model. The state that it
carries from step to step is in `stateful_linear.py`, its three GEMMs are in `linear_function.py`.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial

import torch

from narrowgauge.devices import is_gpu
from narrowgauge.kernels import quantize
from narrowgauge.kernels.amax import KnownAmax
from narrowgauge.kernels.dispatch import use_kernels
from narrowgauge.nn.gemm_context import GemmContext
from narrowgauge.nn.linear_function import autocast_disabled, fp8_scaling, linear_function, swiglu_mlp
from narrowgauge.nn.loop_checks import require_own_numbers, require_sum
from narrowgauge.nn.native import QuantizedOperand
from narrowgauge.nn.sharded.gathered_weight import GatheredWeight
from narrowgauge.nn.sharded.linear_shards import LinearShards
from narrowgauge.nn.stateful_linear import StatefulLinear
from narrowgauge.nn.weight_state import Accumulation
from narrowgauge.quantization import GradientState, QTensor
from narrowgauge.torch_compat import has_hooks, reshaped


class Linear(StatefulLinear):
    """`torch.nn.Linear` whose three GEMMs compute under a recipe.

    It shares the parameters of the layer it is made from. All that depends on the step (random bits, delayed
    scales, rules that wait) follows `nn.set_step`, which a training loop calls. Without it, each forward call
    that records gradients has random bits of its own (recomputed ones have those of the first time), and
    delayed scales are renewed once an optimizer has taken a step, or `nn.step` says so. There is no second
    derivative, because rounding has none.
    """

    can_leave_bias = True  # a kernel behind this layer may add its bias (`kernels.heads`)
    takes_amax = True  # of its input (`kernels.amax.call`)

    def forward(
        self, input: torch.Tensor, *, with_bias: bool = True, known: KnownAmax | None = None
    ) -> torch.Tensor:
        """(..., K) to (..., N), in the dtype of the input; the bias is added unless another adds it.

        `known` is the amax of the input, from the kernel that wrote it.
        """
        if self.shards.before is not None:
            input = self.shards.before(input)
        weight = self.weight.T if self.spec.transposed else self.weight
        context = self._gemm_context(input, weight, None if known is None else known.of(input))
        if context.weight is not None:
            require_own_numbers(self.weight, context.weight)
        bias: torch.Tensor | None = self.bias if with_bias else None
        if not input.numel():  # no tokens, no numbers to narrow: zeros, and gradients of zero
            bias = None if bias is None else bias.to(input.dtype)
            weight = weight if context.weight is None else context.numbers_of(weight).detach()
            return torch.nn.functional.linear(input, weight.to(input.dtype), bias)
        compute = linear_function
        if context.weight is not None and context.weight.gradient is not None:
            compute = partial(_with_narrow_gradient, self.weight, context.weight.gradient)
        is_sum = self.shards.after is not None  # then the bias is added to the sum over processes
        with autocast_disabled(input.device.type):
            x_MK = input.reshape(-1, self.in_features)
            y_MN = compute(x_MK, weight, None if is_sum else bias, context)
        y = reshaped(y_MN, (*input.shape[:-1], self.out_features))
        if self.shards.after is None:
            return y
        y = self.shards.after(y)
        return reshaped(y, y.shape) if bias is None else (y + bias).to(y.dtype)

    def after_swiglu(
        self, gate_up: torch.nn.Module, input: torch.Tensor, known: KnownAmax | None = None
    ) -> torch.Tensor | None:
        """This layer of SwiGLU of another layer's result, all in one function: (..., K) to (..., N).

        The numbers are those of the three one after the other; less is kept for the backward pass. None where
        they have to be called: without kernels or gradients, with biases, hooks, a gauge or a share of the
        products, and under all but FP8 with one scale a tensor. Weights may be gathered (FSDP).
        """
        if not use_kernels(input) or not isinstance(gate_up, Linear):
            return None
        if not (gate_up._is_alone(input) and self._is_alone(input)):
            return None
        if fp8_scaling(gate_up.spec) != fp8_scaling(self.spec):
            return None
        layers = gate_up, self
        amaxes = None if known is None else known.of(input), None
        contexts = tuple(
            layer._gemm_context(input, layer.weight, amax) for layer, amax in zip(layers, amaxes, strict=True)
        )
        for layer, context in zip(layers, contexts, strict=True):
            if context.weight is not None:
                require_own_numbers(layer.weight, context.weight)
                if context.weight.gradient is not None:
                    require_sum(layer.weight, context.weight.gradient)
        with autocast_disabled(input.device.type):
            x_MK = input.reshape(-1, gate_up.in_features)
            y_MN = swiglu_mlp(x_MK, gate_up.weight, self.weight, contexts)
        return reshaped(y_MN, (*input.shape[:-1], self.out_features))

    @torch.no_grad()
    def forward_weight(self) -> torch.Tensor:
        """The weight's values that the forward matmul multiplies in this step: (N, K), float32."""
        weight_NK, context = self._weight_pass()
        operand = context.operand(weight_NK, "fprop.w", -1)
        if isinstance(operand, QuantizedOperand):
            return self.forward_codes().dequantize()
        return operand.numbers().float()

    @torch.no_grad()
    def forward_codes(self) -> QTensor:
        """The codes and scales of these values, of a cast that has scales."""
        weight_NK, context = self._weight_pass()
        cast = self.spec.casts["fprop.w"]
        return quantize(weight_NK, cast, -1, context.quant_context(weight_NK, "fprop.w"))[0]

    def _weight_pass(self) -> tuple[torch.Tensor, GemmContext]:
        """The weight as (N, K), and the context of a forward pass with one token."""
        weight = self.weight.T if self.spec.transposed else self.weight
        context = self._gemm_context(weight.new_empty(1, self.in_features), weight)
        return context.numbers_of(weight), context

    def add_gradient(self, dw_NK: torch.Tensor, factor: torch.Tensor) -> bool:
        """Add dw * factor (0-dim) to the gradient that waits, if this layer may, on a GPU; else False."""
        waiting = self.accumulation if is_gpu(self.weight.device) else None
        return waiting is not None and waiting.add(dw_NK, False, factor)

    def _is_alone(self, input: torch.Tensor) -> bool:
        """Whether this layer may be a part of a larger function."""
        is_trained = torch.is_grad_enabled() and input.requires_grad and self.weight.requires_grad
        is_gathered = not self.is_sharded or isinstance(self.weight, GatheredWeight)
        is_whole = self.shards == LinearShards() and is_gathered and not self.sequence_length
        bias: torch.Tensor | None = self.bias
        is_plain = bias is None and not self.spec.transposed and not has_hooks(self, before=True)
        is_native = input.dtype == self.spec.compute and bool(fp8_scaling(self.spec))
        return is_trained and is_whole and is_plain and is_native and self.observer is None

    def _gemm_context(
        self, input: torch.Tensor, weight_NK: torch.Tensor, input_amax: torch.Tensor | None = None
    ) -> GemmContext:
        """The context of this forward pass and its backward pass."""
        samples = input.shape[0] if input.ndim > 2 else 1
        # Some tokens of sequences, as an expert has them, have random bits as if all were there.
        share = Fraction(len(input), self.sequence_length) if self.sequence_length else samples
        return GemmContext(
            self.spec,
            self.begin_pass(),
            share,
            self.shards.tensor_shards(samples, input[..., 0].numel(), *weight_NK.shape),
            None if self.is_sharded else self.state_at_rest,
            self.observer,
            None if torch.compiler.is_compiling() else self.accumulation,
            input_amax,
        )


@contextmanager
def accumulating(model: torch.nn.Module, keeps_codes: bool, keeps_both: bool = False) -> Iterator[None]:
    """The micro-batches of one step, whose weights do not change and whose gradients only `backward` sums.

    A layer then adds the gradient of its weight to the one that waits, in one pass. On a CPU a weight that
    modules share is left to autograd, which adds up its gradients in another order.

    Args:
        model: The model.
        keeps_codes: Whether layers keep the codes of their weights from one micro-batch to the next.
        keeps_both: Whether they keep those of small weights along both axes.
    """
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    try:
        for layer in layers:
            is_added = uses[id(layer.weight)] == 1 or is_gpu(layer.weight.device)
            layer.accumulation = Accumulation(layer.weight if is_added else None, keeps_codes, keeps_both)
        yield
    finally:
        for layer in layers:
            layer.accumulation = None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_narrow_gradient(
    parameter: torch.Tensor,
    gradient: GradientState,
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    context: GemmContext,
) -> torch.Tensor:
    """`linear_function` outside of compiled graphs, which cannot hold a gradient written on the side."""
    require_sum(parameter, gradient)
    y_MN: torch.Tensor = linear_function(x_MK, w_NK, bias_N, context)
    return y_MN
