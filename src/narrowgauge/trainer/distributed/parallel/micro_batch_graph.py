"""A micro-batch as a CUDA graph: its launches are recorded once, and one call of the host repeats them all.

For a micro-batch of Qwen2.5-1.5B the host runs tens of thousands of Python calls to launch 1,300 kernels
(`benchmarks/host.py`). Small models and fast GPUs then wait for it. A graph has no such cost.

**`torch.cuda.graph`** records a whole micro-batch: forward, backward, and the sums of gradients. Torch has
two other means, and both leave out what pays here:

    make_graphed_callables    records the two passes of a module, and returns gradients in separate memory:
                              autograd then sums them outside, 12 bytes a parameter and a launch for each. It
                              has no place for what one micro-batch keeps for the next, the codes of weights
    compile's graph trees     need compiled code, in which our kernels are off: other launches, other digits

**Two graphs** stand for a step of any length. The first micro-batch casts the weights and writes gradients;
each further one reads the same codes and adds to the same gradients. They share a memory pool: what the first
leaves behind is where the second finds it, in every step.

A graph repeats launches with the arguments that they had. So tokens, the micro-batch's weight, the keys of
random bits and the number of the first sample are copied into fixed memory before each replay; histories,
weights and sums of losses are in fixed memory anyway. If the address of a parameter or of a history changes,
or the casts of a layer, both graphs are recorded again.

**Outside the graphs** the host reads or decides: the norm and its clip, the guard, the update, the ends of
histories. A step that gauges or the search for a NaN read runs as usual, and so does validation. These need
memory that the graphs hold, so it is given back before; the next step records again. That takes as long as
two micro-batches on the host.

`graph_gap` is the list of what a graph can hold; the unknown is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.kernels.amax import amaxes_of_graph, begin_amaxes
from narrowgauge.kernels.attention import Attention
from narrowgauge.kernels.dropout import Dropout
from narrowgauge.kernels.residual import Residual
from narrowgauge.nn import Linear
from narrowgauge.nn.histories import AmaxHistory, ChannelChoice, HeldAmax, History
from narrowgauge.system.torch_compat import copy_each, has_hooks
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.distributed.pipeline import MicroBatch
from narrowgauge.trainer.models import Transformer, objective_of
from narrowgauge.trainer.models.layers import Block, HeadNorm, Norm, StreamNorm
from narrowgauge.trainer.models.operators import Embedding

#: Modules whose passes launch kernels and read nothing on the host.
_HELD = (
    *(Transformer, Block, Norm, StreamNorm, HeadNorm, Embedding, Residual, Attention, Linear, Dropout),
    *(nn.ModuleList, AmaxHistory, HeldAmax, ChannelChoice),
)
_POSITIONS = {Linear: ("keys", "first_sample"), Dropout: ("key", "first_sample")}


class CudaGraphs:
    """Records by `torch.cuda.graph`: several graphs in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run launches on the stream that is recorded later, so that libraries have their memory for it."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of `run` without running them; returns the function that repeats them, on the
        current stream."""
        graph = torch.cuda.CUDAGraph()
        pool = self.graphs[0].pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            run()
        self.graphs.append(graph)
        return graph.replay

    def release(self) -> None:
        """Destroy the graphs once the device has finished; other allocations may take their memory."""
        if self.graphs:
            torch.cuda.synchronize(self.device)
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()


def graph_gap(model: Transformer, is_single: bool, compiles: bool) -> str:
    """Why graphs cannot hold the micro-batches of a model, as a clause; "" if they can.

    Args:
        model: A model under its recipe.
        is_single: Whether one process has all of it.
        compiles: Whether it runs through torch.compile.
    """
    if not is_single:
        return "several processes exchange gradients and weights within a micro-batch"
    if compiles:
        return "compiled code decides itself what it launches"
    if model.compute_dtype == torch.float16:
        return "the loss scale of fp16 follows what the host has read"
    for name, module in model.named_modules():
        if type(module) not in _HELD:
            return f"{name} is {type(module).__name__}, whose launches may depend on values"
        if has_hooks(module) or has_hooks(module, before=True):
            return f"a hook of {name or 'the model'} may read values"
        if isinstance(module, Linear) and module.state_at_rest is not None:
            return f"the weight or the gradient of {name} is stored in a cast, and the host tracks its state"
    if any(has_hooks(p) for p in model.parameters()):
        return "a hook of a parameter may read its gradient"
    return ""


class MicroBatchGraphs:
    """The two graphs of a model's micro-batches.

    The first step of a kind runs launch by launch, on the memory and the stream that will be recorded:
    kernels are compiled, and every library takes its workspace. The second step is recorded.
    """

    def __init__(
        self,
        model: Transformer,
        loss: Callable[[Batch], Tensor],
        same_weights: Callable[[int], AbstractContextManager[None]],
        recorder: CudaGraphs,
    ) -> None:
        """Nothing is recorded yet.

        Args:
            model: A model without a `graph_gap`.
            loss: The loss of a batch on the device.
            same_weights: The context of a step of n micro-batches (`Engine`).
            recorder: Records launches.
        """
        self.model, self.loss, self.same_weights, self.recorder = model, loss, same_weights, recorder
        self.modules = [m for m in model.modules() if type(m) in _POSITIONS]
        self.histories = [m for m in model.modules() if isinstance(m, History)]
        self.replays: list[Callable[[], None]] = []
        self.held: list[Any] = []  # memory of the graphs that no attribute of the model refers to
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.signature: tuple[Any, ...] = ()  # of the step that was warmed up or recorded last
        self.inputs: _Inputs | None = None

    def take(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Whether these micro-batches are alike, and have no documents or targets to leave out."""
        batches = [m.batch for m in micro_batches]
        shapes = {b.x_BT.shape for b in batches}
        return len(shapes) == 1 and not any(b.ignores or b.position_BT is not None for b in batches)

    def accumulate(self, micro_batches: Sequence[MicroBatch], begin: Callable[[int], None]) -> Tensor:
        """As `Engine.accumulate`, of micro-batches that `take` accepts; gradients are the graphs'."""
        signature = self._signature(micro_batches)
        if signature != self.signature:
            self.release()
            inputs = self.inputs = _Inputs(micro_batches[0], self.model, self._position())
            with self.same_weights(len(micro_batches)), self.recorder.aside():
                for i, micro_batch in enumerate(micro_batches):
                    self._use_inputs(inputs, micro_batch, begin, i)
                    self._pass(inputs)
            self.signature = signature
            return inputs.total.clone()
        assert self.inputs is not None
        if not self.replays:
            self._record(self.inputs, micro_batches, begin)
        self.inputs.total.zero_()
        for i, micro_batch in enumerate(micro_batches):
            begin(i)
            self.inputs.take(micro_batch, self._position())
            self.replays[min(i, 1)]()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        return self.inputs.total.clone()

    def release(self) -> None:
        """Give back the memory of the graphs for work that runs without them; the next step records again."""
        self.replays.clear()
        self.held.clear()
        self.gradients.clear()
        self.recorder.release()

    def _record(
        self, inputs: "_Inputs", micro_batches: Sequence[MicroBatch], begin: Callable[[int], None]
    ) -> None:
        """Record the graphs of the first micro-batch and of a further one."""
        with self.same_weights(len(micro_batches)):
            for i, micro_batch in enumerate(micro_batches[:2]):
                self._use_inputs(inputs, micro_batch, begin, i)
                with amaxes_of_graph():
                    self.replays.append(self.recorder.record(partial(self._pass, inputs)))
            self.held += [m.accumulation for m in self.modules if isinstance(m, Linear)]
        self.gradients = {p: p.grad for p in self.model.parameters() if p.grad is not None}

    def _pass(self, inputs: "_Inputs") -> None:
        """One micro-batch from fixed memory: what is recorded."""
        begin_amaxes()
        loss = self.loss(inputs.batch) * inputs.weight
        objective_of(loss).backward()
        inputs.total += loss.detach()

    def _use_inputs(
        self, inputs: "_Inputs", micro_batch: MicroBatch, begin: Callable[[int], None], i: int
    ) -> None:
        """Begin a micro-batch, fill the fixed memory, and let the modules read their positions there."""
        begin(i)
        inputs.take(micro_batch, self._position())
        positions = iter(inputs.positions)
        for module in self.modules:
            for name in _POSITIONS[type(module)]:
                if getattr(module, name) is not None:
                    setattr(module, name, next(positions))

    def _position(self) -> list[Tensor]:
        """The keys and first samples of all modules, which each micro-batch makes again."""
        found = (getattr(m, name) for m in self.modules for name in _POSITIONS[type(m)])
        return [t for t in found if t is not None]

    def _signature(self, micro_batches: Sequence[MicroBatch]) -> tuple[Any, ...]:
        """What recorded launches depend on besides the inputs: equal if both graphs still hold."""
        model = self.model
        options = (
            *(model.training, model.recompute, model.selective, model.chunked_loss),
            *(model.z_loss, torch.are_deterministic_algorithms_enabled()),
        )
        states = [*model.parameters(), *(t for h in self.histories for t in h.tensors().values())]
        addresses = [(t.data_ptr(), t.requires_grad) for t in states]
        specs = [m.spec for m in self.modules if isinstance(m, Linear)]
        return len(micro_batches) > 1, micro_batches[0].batch.x_BT.shape, options, addresses, specs


class _Inputs:
    """The fixed memory that differs in content from one micro-batch to the next."""

    def __init__(self, like: MicroBatch, model: Transformer, positions: Sequence[Tensor]) -> None:
        device = model.embedding.weight.device
        x_BT, y_BT = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in like.batch)
        self.batch = Batch(x_BT, y_BT, x_BT.numel())
        self.weight = torch.zeros((), dtype=torch.float32, device=device)
        self.total = torch.zeros(model.loss_shape, dtype=torch.float32, device=device)
        self.positions = [torch.empty_like(t) for t in positions]

    def take(self, micro_batch: MicroBatch, positions: Sequence[Tensor]) -> None:
        """Copy a micro-batch and its position here, without waiting for the device."""
        self.batch.x_BT.copy_(micro_batch.batch.x_BT, non_blocking=True)
        self.batch.y_BT.copy_(micro_batch.batch.y_BT, non_blocking=True)
        self.weight.fill_(micro_batch.weight)
        moved = [(to, t) for to, t in zip(self.positions, positions, strict=True) if to is not t]
        if moved:
            copy_each([to for to, _ in moved], [t for _, t in moved])
