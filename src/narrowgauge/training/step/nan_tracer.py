"""Which tensor of a bad step was the first to hold a NaN or an infinity?

A step that is skipped is computed once more from the same state, with the same micro-batches and the same
random bits, and with a look at everything on the way, in the order in which it comes to be:

    state        weights, masters, moments, what recipes remember
    forward      what embeddings and norms put out; of each linear layer `fprop.x` and `fprop.w`, each as it
                 came and as the GEMM saw it, and the product `fprop.y`; the loss
    backward     what arrives at the same modules; `dgrad.dy`, `dgrad.dx`, `wgrad.dw` ...
    gradients    of each parameter, as they are added up, and their norms

The first that is not finite is named, and nothing else is looked at from there on. A second look changes
nothing: what the step has left in histories and gradients is forgotten before it and after it. Layers find a
`NanTracer` where gauges are laid on; one that recomputes activations shows them twice, and the first time
counts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from narrowgauge.checkpoint import is_finite
from narrowgauge.nn import Linear, Observation
from narrowgauge.quantization import gradient_of

_STATE = re.compile(r"(.+)\.(?:weight|bias)\.([^.]+)\..*")


@dataclass(frozen=True)
class FirstBad:
    """The first bad tensor of a step, as far as one rank can tell.

    Attributes:
        layer: the module, or the parameter of a gradient; "" for none.
        place: as in a recipe (`fprop.x`, `grad`, `m`), or `output`, `loss`; "" where nothing was found.
        what: which tensor of that place, in words.
        micro_batch: of the rank's, from 0; None for state.
        order: how many tensors were seen before it, which compares it with what other ranks found.
        rank: who found it.
    """

    layer: str
    place: str
    what: str
    micro_batch: int | None = None
    order: int = 0
    rank: int = 0

    def __str__(self) -> str:
        if not self.place:
            return self.what
        at = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        name = f"{self.layer} {self.place}".strip()
        return f"the first bad tensor is {name}, {self.what}{at}, on rank {self.rank}"

    def as_json(self) -> dict[str, Any]:
        """For the metrics."""
        return asdict(self)


NOTHING = FirstBad(
    "", "", "computed again, every number of the step was finite: memory or hardware that fails, or a hook"
)
COMPILED = FirstBad("", "", "the first bad tensor is not known, because training.compile = true hides them")


def earliest(found: Sequence[FirstBad]) -> FirstBad:
    """Of what several ranks found, the tensor that came to be first."""
    named = [f for f in found if f.place]
    return min(named, key=lambda f: (f.order, f.rank)) if named else found[0]


class NanTracer:
    """Laid on a model for one step: `with NanTracer(model, rank) as look:`, then `look.first`."""

    def __init__(self, model: torch.nn.Module, rank: int = 0) -> None:
        self.model, self.rank, self.first = model, rank, NOTHING
        self.micro_batch, self.seen = -1, 0
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            if isinstance(module, Linear):
                module.observer = _LayerTracer(name, self)
            elif not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(partial(self._output, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self.model.modules():
            if isinstance(module, Linear):
                module.observer = None

    def see(self, layer: str, place: str, what: str, tensor: torch.Tensor) -> None:
        """Look at one tensor, unless something bad was found already."""
        self.seen += 1
        tensor = getattr(tensor, "to_local", lambda: tensor)()  # of a sharded one, what this rank holds
        if not self.first.place and not is_finite(tensor):
            at = None if self.micro_batch < 0 else self.micro_batch
            self.first = FirstBad(layer, place, what, at, self.seen, self.rank)

    def state(self, groups: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Look at what a step begins with: the groups of a checkpoint."""
        for group, named in groups.items():
            for name, tensor in named.items():
                found = _STATE.fullmatch(name)
                layer, place = found.groups() if found else name.rpartition(".")[::2]
                self.see(layer, place, f"state of the {group} from before the step", tensor)

    def begin_micro_batch(self, is_first: bool, is_last: bool) -> None:
        """The next one begins."""
        self._gradients()
        self.micro_batch += 1

    def after_forward(self, loss: torch.Tensor) -> None:
        """The forward pass has given a loss."""
        self.see("", "loss", "the end of the forward pass", loss)

    def after_backward(self) -> None:
        """The last backward pass has ended."""
        self._gradients()
        for name, p in self.model.named_parameters():
            if (g := gradient_of(p)) is not None:
                norm = torch.linalg.vector_norm(g)
                self.see(name, "grad", "whose elements are finite and whose norm is not", norm)

    def _gradients(self) -> None:
        for name, p in self.model.named_parameters():
            if not self.first.place and (g := gradient_of(p)) is not None:
                self.see(name, "grad", "its gradient when it was added up", g)

    def _output(self, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Look at what a module has put out, and later at the gradient that comes back to it."""
        if isinstance(output, tuple):  # of a norm that hands on the stream
            output = output[-1]
        if isinstance(output, torch.Tensor):
            self.see(name, "output", "what it put out", output)
            if output.requires_grad:
                arrives = partial(self.see, name, "output", "the gradient that came back to it")
                output.register_hook(lambda g: arrives(g))


@dataclass(frozen=True, slots=True)
class _LayerTracer:
    """What a linear layer shows its operands and products to (`nn.Observer`)."""

    layer: str
    look: NanTracer

    def operand(self, observation: Observation) -> None:
        """Look at an operand as it came, then in the numbers of its place."""
        place, became = observation.place, observation.cast.name
        self.look.see(self.layer, place, "as it came to the GEMM, before any rounding", observation.x)
        self.look.see(self.layer, place, f"finite before it became {became}", observation.seen)

    def product(self, place: str, c_MN: torch.Tensor, a_MK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """Look at a product."""
        self.look.see(self.layer, place, "a product of finite operands", c_MN)
