"""Faults of a step: the first tensor that contained a NaN or an infinity, and silent corruption.

A skipped step is computed again from the same state, with the same micro-batches and random bits, and every
tensor is checked in the order of computation:

    state        weights, masters, moments, the state of the recipe
    forward      the outputs of embeddings, norms and attention; in each linear layer `fprop.x` and
                 `fprop.w`, each before and after its cast, and the matmul's result `fprop.y`; places of
                 attention and the stream where a recipe quantizes them; the loss
    backward     the gradients of the same outputs; `dgrad.dy`, `dgrad.dx`, `wgrad.dw` ...
    gradients    of each parameter, as they are accumulated, and their norms

The first non-finite tensor is reported, and nothing is checked after it. The second computation has no
effect: histories and gradients of the step are discarded before and after it. A `NanTracer` is attached to
layers like gauges; a layer that recomputes activations produces them twice, and the first time counts.

Silent corruption, values changed by faulty memory or a faulty core, is detected by two checks:

- *Replicas.* Processes that hold the same tensors must hold the same bits. Each process sums the bit patterns
  of each tensor, as integers, modulo 2^64. The order of the elements does not matter, so the sums of a
  tensor's shards add up to its sum. One flipped bit k changes the sum by 2^k, so it is always detected
  (several may cancel).
- *Replay.* The same step computed twice from the same state must give the same loss and gradients, bit for
  bit. It needs no second process, detects faults during the computation, and costs a step. On a GPU it needs
  deterministic kernels.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from narrowgauge.nn import Observation, Stepped
from narrowgauge.quantization import gradient_of
from narrowgauge.system.errors import Failed
from narrowgauge.trainer.checkpoint import is_finite

_BEFORE_CAST = "finite before it became"
_OF_STATE = "state of the"
_STATE = re.compile(r"(.+)\.(?:weight|bias)\.([^.]+)\..*")


@dataclass(frozen=True)
class FirstBad:
    """The first bad tensor of a step on one rank.

    Attributes:
        layer: the module, or the parameter of a gradient; "" for none.
        place: a place of the recipe (`fprop.x`, `grad`, `m`), `output` or `loss`; "" if no tensor was bad.
        what: which tensor of that place, in words.
        micro_batch: the rank's micro-batch, counted from 0; None for state.
        order: how many tensors were checked up to it, which orders the tensors of several ranks.
        rank: the rank that found it.
    """

    layer: str
    place: str
    what: str
    micro_batch: int | None = None
    order: int = 0
    rank: int = 0

    @property
    def is_of_cast(self) -> bool:
        """Whether the tensor was finite before its cast, or is state stored in one."""
        return self.what.startswith((_BEFORE_CAST, _OF_STATE))

    def __str__(self) -> str:
        if not self.place:
            return self.what
        at = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        name = f"{self.layer} {self.place}".strip()
        return f"the first bad tensor is {name}, {self.what}{at}, on rank {self.rank}"


NOTHING = FirstBad(
    "", "", "computed again, every number of the step was finite: memory or hardware that fails, or a hook"
)
COMPILED = FirstBad("", "", "the first bad tensor is not known, because training.compile = true hides them")


def earliest(of_ranks: Sequence[FirstBad]) -> FirstBad:
    """The earliest of several ranks' first bad tensors."""
    named = [bad for bad in of_ranks if bad.place]
    return min(named, key=lambda bad: (bad.order, bad.rank)) if named else of_ranks[0]


class NanTracer:
    """Checks the tensors of one step: `with NanTracer(model, rank) as tracer:`, then `tracer.first`."""

    def __init__(self, model: torch.nn.Module, rank: int = 0) -> None:
        self.model, self.rank, self.first = model, rank, NOTHING
        self.micro_batch, self.checked = -1, 0
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            if isinstance(module, Stepped):
                module.observer = _LayerTracer(name, self)
            elif not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(partial(self._output, name)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self.model.modules():
            if isinstance(module, Stepped):
                module.observer = None

    def check(self, layer: str, place: str, what: str, tensor: torch.Tensor) -> None:
        """Check one tensor, or its local shard, unless a bad one was found before."""
        self.checked += 1
        tensor = getattr(tensor, "to_local", lambda: tensor)()
        if not self.first.place and not is_finite(tensor):
            micro_batch = None if self.micro_batch < 0 else self.micro_batch
            self.first = FirstBad(layer, place, what, micro_batch, self.checked, self.rank)

    def state(self, groups: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Check the state before the step: the groups of a checkpoint."""
        for group, named in groups.items():
            for name, tensor in named.items():
                match = _STATE.fullmatch(name)
                layer, place = match.groups() if match else name.rpartition(".")[::2]
                self.check(layer, place, f"{_OF_STATE} {group} from before the step", tensor)

    def begin_micro_batch(self, is_first: bool, is_last: bool) -> None:
        """Check the gradients so far, and begin the next micro-batch."""
        self._gradients()
        self.micro_batch += 1

    def after_forward(self, loss: torch.Tensor) -> None:
        """Check the loss of a forward pass."""
        self.check("", "loss", "the end of the forward pass", loss)

    def after_backward(self) -> None:
        """Check gradients and their norms after the last backward pass."""
        self._gradients()
        for name, p in self.model.named_parameters():
            if (g := gradient_of(p)) is not None:
                norm = torch.linalg.vector_norm(g)
                self.check(name, "grad", "whose elements are finite and whose norm is not", norm)

    def _gradients(self) -> None:
        for name, p in self.model.named_parameters():
            if not self.first.place and (g := gradient_of(p)) is not None:
                self.check(name, "grad", "its gradient when it was added up", g)

    def _output(self, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Check the output of a module, and in the backward pass its gradient."""
        if isinstance(output, tuple):  # a norm that also returns the residual stream
            output = output[-1]
        if isinstance(output, torch.Tensor):
            self.check(name, "output", "what it put out", output)
            if output.requires_grad:
                check = partial(self.check, name, "output", "the gradient that came back to it")
                output.register_hook(lambda g: check(g))


@dataclass(frozen=True, slots=True)
class _LayerTracer:
    """The observer of one layer's operands and matmuls (`nn.Observer`)."""

    layer: str
    tracer: NanTracer

    def operand(self, observation: Observation) -> None:
        """Check an operand before its cast, then after it."""
        place, cast = observation.place, observation.cast.name
        self.tracer.check(self.layer, place, "as it came to the GEMM, before any rounding", observation.x)
        self.tracer.check(self.layer, place, f"{_BEFORE_CAST} {cast}", observation.values)

    def product(self, place: str, c_MN: torch.Tensor, a_RK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """Check the result of a matmul."""
        self.tracer.check(self.layer, place, "a product of finite operands", c_MN)


_BLOCK = 1 << 22  # elements widened to 64 bits at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Corrupted(Failed):
    """Values that must be equal differ: exit code 1. Nothing is saved after that."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bit patterns of a tensor, or of its local shard: int64 with wrap-around, 0-dim.

    Patterns are signed integers of 2, 4 or 8 bytes, or unsigned bytes.
    """
    t = getattr(tensor, "to_local", lambda: tensor)().detach().contiguous()
    flat = t.view(-1).view(_INTEGERS[t.element_size()]) if t.numel() else t.new_zeros(0, dtype=torch.uint8)
    return torch.stack([block.sum(dtype=torch.int64) for block in flat.split(_BLOCK)]).sum()


def fingerprint(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, int]:
    """`{"GROUP NAME": sum of bits}` of tensors by group and name, such as `TrainState.tensors()`.

    It reads each element once, and synchronizes once.
    """
    sums = {f"{group} {name}": bits_of(t) for group, named in groups.items() for name, t in named.items()}
    if not sums:
        return {}
    device = max(sums.values(), key=lambda value: value.is_cuda).device  # others may be in the host's memory
    return dict(zip(sums, torch.stack([value.to(device) for value in sums.values()]).tolist(), strict=True))


def step_fingerprint(loss: torch.Tensor, names: Mapping[torch.Tensor, str]) -> dict[str, int]:
    """The fingerprint of a loss and of the gradients of named parameters, quantized or not."""
    gradients = {name: g for p, name in names.items() if (g := gradient_of(p)) is not None}
    return fingerprint({"the": {"loss": loss}, "the gradient of": gradients})


def require_same_replicas(fingerprints: Sequence[Mapping[str, int]], step: int) -> None:
    """Compare the replicas after a step.

    Raises:
        Corrupted: they differ; the message names the tensor, and the ranks in the minority of its holders, or
            all of these without a majority.
    """
    for name in dict.fromkeys(name for sums in fingerprints for name in sums):
        held = {rank: sums[name] for rank, sums in enumerate(fingerprints) if name in sums}
        values = list(held.values())
        most = max(values, key=values.count)
        if (count := values.count(most)) == len(values):
            continue
        ranks = [rank for rank, v in held.items() if 2 * count <= len(values) or v != most]
        who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        raise Corrupted(
            f"after step {step} the replicas differ in {name}, on {who}: memory or hardware fails there; "
            "nothing was saved since, so leave that machine out and give the same line again"
        )


def require_same_replay(first: Mapping[str, int], second: Mapping[str, int], step: int) -> None:
    """Compare both fingerprints of a step that was computed twice.

    Raises:
        Corrupted: they differ; the message names the tensor.
    """
    if name := next((name for name in {**first, **second} if first.get(name) != second.get(name)), None):
        raise Corrupted(
            f"step {step} was computed twice from the same state, and {name} differs: memory or hardware "
            "fails, or a kernel is not deterministic; see guard.replay_every, and try another machine"
        )
