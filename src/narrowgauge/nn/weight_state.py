"""A linear layer's weight, master and gradient at rest in a recipe's numbers.

The parameter stays a parameter under its own name, in the dtype of its elements (bf16, fp16, FP8); scales lie
beside it. Autograd cannot add up gradients in FP8, so the layer's backward pass writes a narrow gradient
itself and `parameter.grad` stays None. What belongs to a parameter hangs on it, for the optimizer to find:

    parameter.at_rest      the weight                     or None: the parameter is the weight
    parameter.master       a wider copy, to be updated    or None: the weight itself is updated
    parameter.gradient     the sum over micro-batches     or None: it is `parameter.grad`

Master and gradient may lie in the host's memory (`offload`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from narrowgauge.formats import RandomStream, torch_dtype
from narrowgauge.quantization import Cast, PreScale, QuantizedState, TensorShard
from narrowgauge.quantization.sharding.amax import all_reduce_amaxes
from narrowgauge.quantization.state.prescale import Prescaled, prescaled


class GradientState(QuantizedState):
    """A gradient that is added up in float32 and stored after each micro-batch.

    Attributes:
        is_empty: whether nothing has been added.
        sums: how often something has, if it is not empty.
    """

    def __init__(
        self,
        shape: torch.Size,
        cast: Cast,
        device: torch.device | str = "cpu",
        on_host: bool = False,
        part: TensorShard | None = None,
    ) -> None:
        """Empty; see `QuantizedState`."""
        self.is_empty, self.sums = True, 0
        self.prescale = PreScale(device) if cast.prescale else None
        super().__init__(shape, cast, device, on_host, part)

    def add(self, x: torch.Tensor, stream: RandomStream | None) -> None:
        """Add float32 numbers, rounding the sum once; with random bits nothing small is lost on average."""
        add_all([self], [x], [stream])

    def discard_step(self) -> None:
        """Give the pre-scaling factor back what this step has taught it."""
        if self.prescale is not None and not self.is_empty:
            self.prescale.discard_step()

    def move(self, device: torch.device) -> None:
        """Go to another device, the pre-scaling factor with it."""
        super().move(device)
        if self.prescale is not None:
            self.prescale.move(device)


def add_all(
    gradients: Sequence[GradientState],
    tensors: Iterable[torch.Tensor],
    streams: Iterable[RandomStream | None],
) -> None:
    """`GradientState.add` for each; processes that hold them together agree on all their scales at once."""
    totals = [x if g.is_empty else g.read() + x for g, x in zip(gradients, tensors, strict=True)]
    every = list(zip(gradients, totals, strict=True))
    factors = [(g, x, g.prescale) for g, x in every if g.prescale is not None]
    for g, _, prescale in factors:
        if g.is_empty:
            prescale.begin_step()
    scales = iter(prescaled([Prescaled(prescale, x, g.cast, g.part) for g, x, prescale in factors]))
    sharing = [(g, x) for g, x in every if g.prescale is None and g.shares_scale]
    largest = iter(all_reduce_amaxes([x for _, x in sharing], [g.part for g, _ in sharing]))
    for (g, x), stream in zip(every, streams, strict=True):
        if g.prescale is not None:
            g.write(x, stream, encode_scale=next(scales))
        else:
            g.write(x, stream, amax=next(largest) if g.shares_scale else None)
        g.sums = 1 if g.is_empty else g.sums + 1
        g.is_empty = False


def master_or_weight(parameter: torch.Tensor) -> torch.Tensor:
    """The best that is known of a weight, as float32."""
    for name in ("master", "at_rest"):
        stored_tensor = getattr(parameter, name, None)
        if stored_tensor is not None:
            return stored_tensor.read()
    return parameter.detach().float()


def stored_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that holds a parameter's numbers, or the codes of a weight at rest, as they lie here."""
    at_rest = getattr(parameter, "at_rest", None)
    if at_rest is None:
        return parameter.detach()
    first = next(iter(at_rest.tensors.values()))
    return first.view(torch_dtype(at_rest.cast.element) or first.dtype)


class WeightState:
    """The state of one parameter; where that lies in a larger one (`part`) hangs on it, too."""

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        state: Mapping[str, Cast | None],
        offload: Collection[str] = (),
        shard: torch.Tensor | None = None,
    ) -> None:
        """Take over the parameter's numbers, in its place; `offload` names what lies on the host.

        `shard` has the numbers that are here of a parameter that is cut (`nn.shards`).
        """
        self.parameter, self.is_shard = parameter, shard is not None
        self.at_rest = self.master = self.gradient = None
        numbers = master_or_weight(parameter) if shard is None else shard
        shape, device = numbers.shape, parameter.device
        part = getattr(parameter, "part", None)
        weight, master, grad = (state[place] for place in ("weight", "master", "grad"))
        assert weight is not None
        assert grad is not None
        if shard is None and getattr(parameter, "at_rest", None) is not None:  # it was under another recipe
            parameter.data = numbers
        if weight.name != "fp32":
            self.at_rest = QuantizedState(shape, weight, device, part=part)
            _begin(self.at_rest, numbers)
        if master is not None:
            self.master = QuantizedState(shape, master, device, "master" in offload, part)
            _begin(self.master, numbers)
        if self.at_rest is not None or grad.name != "fp32":
            self.gradient = GradientState(shape, grad, device, "grad" in offload, part)
        self.bind(parameter)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but an fp32 parameter."""
        return self.at_rest is None and self.gradient is None

    def bind(self, parameter: torch.nn.Parameter) -> None:
        """Make the parameter hold the stored numbers; again after anything that gave it its own tensor."""
        self.parameter = parameter
        for each in (self.at_rest, self.master, self.gradient):
            if each is not None:
                each.move(parameter.device)
        if self.at_rest is not None and not self.is_shard:
            stored_tensor = next(iter(self.at_rest.tensors.values()))
            parameter.data = stored_tensor.view(torch_dtype(self.at_rest.cast.element) or stored_tensor.dtype)
        for name in ("at_rest", "master", "gradient"):
            setattr(parameter, name, getattr(self, name))

    def read(self) -> torch.Tensor:
        """The weight as float32, or the parameter itself."""
        return self.parameter if self.at_rest is None else self.at_rest.read()

    def operand(self) -> torch.Tensor:
        """The numbers that products see: those of the parameter where it needs no scale, else float32."""
        if self.at_rest is None or not self.at_rest.cast.is_scaled:
            return self.parameter
        return self.at_rest.read()

    @torch.no_grad()
    def write(self, x: torch.Tensor) -> None:
        """Give weight and master new numbers."""
        for each in (self.at_rest, self.master):
            if each is not None:
                each.write(x.to(self.parameter.device).float())

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has to hold beside the parameter, by name."""
        beside = {} if self.at_rest is None else dict(list(self.at_rest.tensors.items())[1:])
        named = {f"weight.{k}": t for k, t in beside.items()}
        named |= {f"master.{k}": t for k, t in (self.master.tensors if self.master else {}).items()}
        prescale = self.gradient.prescale if self.gradient else None
        return named | ({} if prescale is None else {f"grad.{k}": t for k, t in prescale.tensors.items()})


def _begin(state: QuantizedState, numbers: torch.Tensor) -> None:
    if not numbers.is_meta:  # there is nothing to write
        state.write(numbers)
