"""One training step, top to bottom: micro-batches, forward, backward, the guard's verdict, the update.

`train_state` holds the state that a step changes, and saves and restores it. Where a rule changes the format
of state, model and optimizer are rebuilt between two steps.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.distributed import Mesh, ParallelDims
from narrowgauge.guard import Guard, GuardVerdict
from narrowgauge.guard.raises import raises_of
from narrowgauge.nn import Gauges, discard_step
from narrowgauge.optim import set_learning_rate
from narrowgauge.system.torch_compat import compiled_as_eager
from narrowgauge.trainer.checkpoint import read_state
from narrowgauge.trainer.data import Batch, Loader, Mixture, first_samples
from narrowgauge.trainer.distributed import Engine, MicroBatch, parallelize
from narrowgauge.trainer.models import experts_of
from narrowgauge.trainer.training.config.config import Config
from narrowgauge.trainer.training.step.build_model import (
    build_model,
    build_optimizer,
    go_to,
    graphs_for,
    number_parameters,
)
from narrowgauge.trainer.training.step.step_faults import (
    COMPILED,
    FirstBad,
    NanTracer,
    earliest,
    require_same_replay,
    step_fingerprint,
)
from narrowgauge.trainer.training.step.train_state import TrainState, hold, put_back


@dataclass
class Trainer(TrainState):
    """The state of a run, and the optimizer step that advances it."""

    in_force: Config | None = None  # the configuration with the current recipe of model and optimizer
    verdict: GuardVerdict = field(default_factory=GuardVerdict)  # on the last step
    first_bad: FirstBad | None = None  # of the last step; None if it was finite
    terms: dict[str, float] = field(default_factory=dict)  # of the last step, in addition to its loss
    tokens: dict[str, list[int]] = field(default_factory=dict)  # of each expert in it, by layer
    micro_batches: Sequence[MicroBatch] = ()  # of the last step

    @classmethod
    def begin(cls, config: Config, device: torch.device, mesh: Mesh | None = None) -> "Trainer":
        """The state before the first step; with several processes, its local shard."""
        trainer = cls._build(config.in_force((), 0), device, mesh)
        trainer.config = config
        if config.spec.recipe.compute == "fp16" and device.type != "meta":
            trainer.scaler = torch.amp.GradScaler(device.type)
            trainer.scaler.scale(torch.zeros((), device=device))  # a stage without the loss never does
        return trainer

    @classmethod
    def _build(cls, config: Config, device: torch.device, mesh: Mesh | None) -> "Trainer":
        """Model, optimizer and engine under the recipe in effect, in their initial state."""
        mesh = mesh or Mesh(ParallelDims(), device)
        modules: Sequence[Callable[..., torch.Tensor]]
        if mesh.is_single:
            model = build_model(config.spec, device)
            # The memory estimate tracks operations on the meta device, and compiled code hides them. Worse,
            # torch's compiler never again compiles code that it first met under such a tracker.
            is_compiled = config.training.compile and device.type != "meta"
            modules = [compiled_as_eager(model.loss) if is_compiled else model.loss]
        else:
            model, modules = parallelize(config.spec, mesh, device)
            number_parameters(config, model)
        engine = Engine(model, mesh, device, modules)
        optimizer, guard = build_optimizer(config, model), Guard(config.guard.rules())
        trainer = cls(config, device, model, optimizer, engine, guard, in_force=config)
        engine.attach(optimizer)
        if (recorder := graphs_for(config, engine)) is not None:
            engine.record_graphs(recorder)
        return trainer

    def restore(self, path: Path, group: dist.ProcessGroup | None = None) -> None:
        """Restore the state in a checkpoint of any number of processes; collective over `group`."""
        saved = read_state(path, group)
        self._rebuild(self.config.in_force(raises_of(saved.state), saved.step), keep=False)
        self.fill(path, group)

    def follow_rules(self) -> None:
        """Keep state in the formats of the recipe's rules and the guard's raises for the next step."""
        self._rebuild(self.config.in_force(self.guard.raised, self.step), keep=True)

    def _rebuild(self, config: Config, keep: bool) -> None:
        """Rebuild everything if another recipe is in effect, keeping the state if `keep`."""
        assert self.in_force is not None
        if config.spec.recipe == self.in_force.spec.recipe:
            return
        held = hold(self.model, self.optimizer) if keep else None
        mesh, self.in_force = self.engine.mesh, config
        del self.model, self.optimizer, self.engine
        gc.collect()  # frees memory before the rebuilt objects take theirs
        built = self._build(config, self.device, mesh)
        self.model, self.optimizer, self.engine = built.model, built.optimizer, built.engine
        if held is not None:
            put_back(held, self.model, self.optimizer)
            self.engine.after_update()
            go_to(self.model, self.config, self.step, 0)

    def go_to_sample(self, first: int) -> None:
        """Set the position in the step of the first sequence of the next forward pass."""
        go_to(self.model, self.config, self.step, first)

    def batches(self, train: Mixture) -> Loader:
        """The micro-batches from this step on, prepared in the background until the loader is closed."""
        config, mesh, batch_size = self.config, self.engine.mesh, self.config.spec.batch_size
        size, readers = config.training.micro_batch_size, mesh.parallel_dims.data
        skipped = self.guard.samples - self.step * batch_size
        return Loader(
            train,
            config.spec.seed,
            first_samples(self.step, batch_size, size, mesh.data_index, readers, skipped),
            size,
            config.data.sequence_length,
            config.data.separate_documents,
            pin=self.device.type == "cuda",
            prefetch=max(8, batch_size // (size * readers)),  # a step begins with all its micro-batches
        )

    def train_step(
        self,
        batches: Iterator[Batch],
        after_forward: Callable[[torch.Tensor], None] | None = None,
        gauges: Gauges | None = None,
    ) -> tuple[float, float, float]:
        """Take one optimizer step.

        The guard judges loss and norm. A rejected step leaves weights, moments and histories unchanged; see
        `verdict` and `first_bad`.

        Args:
            batches: the micro-batches of this rank, in order.
            after_forward: called with the loss between each forward pass and its backward pass.
            gauges: gauges that read this step (`Gauges.of`).

        Returns:
            (loss, gradient norm, learning rate). The loss is the mean cross entropy over all targets of the
            step, however they are divided into micro-batches; others are in `terms`.

        Raises:
            Corrupted: the step was computed twice (`guard.replay_every`), and the results differ.
        """
        step, engine, guard = self.step + 1, self.engine, self.guard
        micro_batches = self.next_micro_batches(batches)
        replays = bool(guard.rules.replay_every) and step % guard.rules.replay_every == 0
        if replays:
            rehearsal = step_fingerprint(self._accumulate(micro_batches), self.names)
            discard_step(self.model)
        total = self._accumulate(micro_batches, after_forward, gauges)
        if replays:
            require_same_replay(rehearsal, step_fingerprint(total, self.names), step)
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
            engine.all_reduce_overflow(self.scaler, self.optimizer)
        if gauges is not None:
            gauges.after_backward()
        norm = self.optimizer.clip_grad_norm_(self.config.optimizer.clip_norm).item()
        lr, (loss, self.terms, self.tokens) = self.config.learning_rate(step), step_terms(engine, total)
        self.verdict = guard.judge(loss, norm, bool(self.scaler), step <= self.config.schedule.warmup_steps)
        if self.verdict.accepts:
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            engine.after_update()
        if gauges is not None:
            gauges.after_step()
        self.first_bad = None if self.verdict.is_finite else self._find_first_bad(micro_batches)
        if not self.verdict.accepts:
            discard_step(self.model)
        if self.scaler:
            self.scaler.update()
        self.micro_batches = micro_batches
        self.step, guard.samples = step, guard.samples + self.config.spec.batch_size
        if self.verdict.action != "raise":
            self.follow_rules()
        return loss, norm, lr

    def read_step(self, micro_batches: Sequence[MicroBatch], gauges: Gauges, update: bool) -> None:
        """Compute the step after `step` only to read its gauges; it does not count.

        Args:
            micro_batches: the micro-batches of the step.
            gauges: the gauges.
            update: whether to make the update, so that gauges see state; the state must then be restored.
        """
        self._accumulate(micro_batches, observer=gauges)
        scaling = self.scaler.state_dict() if self.scaler else {}
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
            self.scaler.load_state_dict(scaling)
        gauges.after_backward()
        if update:
            self.optimizer.clip_grad_norm_(self.config.optimizer.clip_norm)
            set_learning_rate(self.optimizer, self.config.learning_rate(self.step + 1))
            self.optimizer.step()
        gauges.after_step()
        discard_step(self.model)

    def next_micro_batches(self, batches: Iterator[Batch]) -> list[MicroBatch]:
        """This rank's micro-batches of the next step, weighted by their share of the targets of all ranks."""
        mesh = self.engine.mesh
        local_samples = self.config.spec.batch_size // mesh.parallel_dims.data
        begin = mesh.data_index * local_samples
        firsts = range(begin, begin + local_samples, self.config.training.micro_batch_size)
        local_batches = [next(batches) for _ in firsts]
        targets = max(self.engine.sum_over_data(sum(batch.targets for batch in local_batches)), 1)
        return [
            MicroBatch(first, batch, batch.targets / targets)
            for first, batch in zip(firsts, local_batches, strict=True)
        ]

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        after_forward: Callable[[torch.Tensor], None] | None = None,
        observer: Gauges | NanTracer | None = None,
    ) -> torch.Tensor:
        """Leave the next step's gradients on the parameters, and return its local loss (`Engine`)."""
        self.optimizer.zero_grad(set_to_none=True)
        for layer in experts_of(self.model.blocks):
            layer.tokens_E = None

        def begin(i: int) -> None:
            go_to(self.model, self.config, self.step + 1, micro_batches[i].first)
            if observer is not None:
                observer.begin_micro_batch(i == 0, i == len(micro_batches) - 1)

        def scale(loss: torch.Tensor) -> torch.Tensor:
            return self.scaler.scale(loss) if self.scaler else loss

        total = self.engine.accumulate(micro_batches, begin, scale, after_forward, observer is not None)
        self.engine.finish_backward()
        return total

    def _find_first_bad(self, micro_batches: Sequence[MicroBatch]) -> FirstBad:
        """Compute the step just judged again, and find its first bad tensor on any process."""
        if self.config.training.compile:
            return COMPILED
        discard_step(self.model)
        with NanTracer(self.model, self.engine.rank) as tracer:
            tracer.state(self.tensors())
            self._accumulate(micro_batches, tracer.after_forward, tracer)
            tracer.after_backward()
        return earliest(self.engine.gather(tracer.first))


def step_terms(engine: Engine, total: torch.Tensor) -> tuple[float, dict[str, float], dict[str, list[int]]]:
    """The figures of a step, from this process's sum of losses. Collective.

    Experts compete for tokens: one that gets few learns little, and then gets fewer. `busiest_expert` is the
    tokens of the busiest expert of any layer, divided by the mean: 1 at best, and experts / experts_per_token
    if all tokens of a layer go to the same experts. The counts themselves are in the gauges of the router
    (`token_lines`).

    Returns:
        (cross entropy, further figures by name, tokens of each expert by layer).
    """
    figures = engine.sum_over_ranks(total.flatten().tolist())
    loss, *others = figures[-max(len(figures) - 1, 1) :]
    terms = dict(zip(("z_loss", "balance_loss"), others, strict=False))
    if not engine.model.z_loss:
        terms.pop("z_loss", None)
    if tokens := _tokens_of_experts(engine):
        terms["busiest_expert"] = max(max(row) * len(row) / max(sum(row), 1) for row in tokens.values())
    return loss, terms, tokens


def _tokens_of_experts(engine: Engine) -> dict[str, list[int]]:
    E = engine.model.config.experts
    if not E:
        return {}
    layers = [getattr(block, "experts", None) for block in engine.model.blocks]  # None: of another stage
    local = [[0] * E if x is None or x.tokens_E is None else x.tokens_E.tolist() for x in layers]
    total = engine.sum_over_ranks([float(n) for row in local for n in row])
    rows = (total[i * E : (i + 1) * E] for i in range(len(layers)))
    return {f"blocks.{i}.experts.router": [int(n) for n in row] for i, row in enumerate(rows)}


def token_lines(tokens: Mapping[str, Sequence[int]], step: int) -> Iterator[dict[str, Any]]:
    """One JSON-ready object for each layer of experts, like the objects of `nn.Gauges.lines`."""
    for layer, row in tokens.items():
        yield {"step": step, "layer": layer, "place": "tokens", "cast": None, "tokens": list(row)}
