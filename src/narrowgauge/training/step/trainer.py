"""What a run is made of, and how its state goes to a checkpoint and comes back bit for bit.

The trajectory is a function of the configuration and of: the weights, the optimizer's moments and step
counts, the number of steps done, and what the guard remembers. Token order and random bits are pure functions
of seed and step (and of how much data the guard has skipped), so there is no generator, no cursor and no
loader state to save.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from narrowgauge.checkpoint import JSON, LocalTensors, restore_distributed, save_distributed
from narrowgauge.data import Batch, Loader, Mixture, Tokens, first_samples
from narrowgauge.distributed import Engine, Mesh, MicroBatch, ModelSpec, ParallelDims, parallelize
from narrowgauge.models import Transformer
from narrowgauge.nn import Gauges, Linear, discard_step, recipe_tensors, set_step
from narrowgauge.nn.weight_state import stored_tensor
from narrowgauge.optim import AdamW, Muon, Optimizer, learning_rate, parameter_groups, set_learning_rate
from narrowgauge.quantization import QuantizedState
from narrowgauge.training.config.config import Config
from narrowgauge.training.step.build_model import build_model, recomputed
from narrowgauge.training.step.checkpoint_slices import local_tensors_of
from narrowgauge.training.step.guard import Guard, GuardVerdict
from narrowgauge.training.step.nan_tracer import COMPILED, FirstBad, NanTracer, earliest
from narrowgauge.training.step.replica_check import (
    common,
    fingerprint,
    require_same_replay,
    require_same_replicas,
    step_fingerprint,
)

# Where the state of each place hangs on a parameter (`nn.weight_state`).
AT_REST = {"weight": "at_rest", "master": "master", "grad": "gradient"}


def make_optimizer(config: Config, model: torch.nn.Module) -> Optimizer:
    """The configuration's optimizer of a model, before its first step."""
    o, recipe, seed = config.optimizer, config.resolved_recipe(), config.training.seed
    groups = parameter_groups(model, o.weight_decay, o.groups, muon=o.name == "muon")
    if o.name == "muon":
        return Muon(groups, recipe, momentum=o.momentum, betas=o.betas, eps=o.eps, seed=seed)
    return AdamW(groups, recipe, betas=o.betas, eps=o.eps, seed=seed)


def number_parameters(config: Config, model: torch.nn.Module) -> None:
    """Tell each parameter its place among all of the whole model's, which its random bits depend on."""
    with torch.device("meta"):
        whole = Transformer(config.resolved_model())
    o = config.optimizer
    groups = parameter_groups(whole, o.weight_decay, o.groups, muon=o.name == "muon")
    numbers = {p: i for i, p in enumerate(p for group in groups for p in group["params"])}
    of_name = {name: numbers[p] for name, p in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.number = of_name[name]  # type: ignore[attr-defined]


@dataclass
class Trainer:
    """A run in motion: everything that changes from step to step."""

    config: Config
    device: torch.device
    model: Transformer
    optimizer: Optimizer
    engine: Engine
    guard: Guard
    step: int = 0
    verdict: GuardVerdict = field(default_factory=GuardVerdict)  # on the last step
    first_bad: FirstBad | None = None  # of the last step, where it was not finite
    scaler: torch.amp.GradScaler | None = None  # of the loss, where gradients pass through fp16

    @classmethod
    def begin(cls, config: Config, device: torch.device, mesh: Mesh | None = None) -> "Trainer":
        """The state before the first step; of several processes, each has its pieces."""
        mesh = mesh or Mesh(ParallelDims(), device)
        modules: Sequence[Callable[..., torch.Tensor]]
        if mesh.is_alone:
            model = build_model(config, device)
            # The account of memory, on the meta device, watches operations, which compiled code hides; worse,
            # what torch's compiler has once met under such a watch, it never compiles.
            is_compiled = config.training.compile and device.type != "meta"
            modules = [torch.compile(model.loss) if is_compiled else model.loss]
        else:
            t = config.training
            plan = ModelSpec(
                config.resolved_model(),
                config.resolved_recipe(),
                t.seed,
                config.recipe.backend,
                recomputed(config),
                t.chunked_loss,
            )
            model, modules = parallelize(plan, mesh, device)
            number_parameters(config, model)
        engine = Engine(model, mesh, device, modules)
        trainer = cls(config, device, model, make_optimizer(config, model), engine, Guard(config.guard))
        trainer.engine.attach(trainer.optimizer)
        if config.resolved_recipe().compute == "fp16" and device.type != "meta":
            trainer.scaler = torch.amp.GradScaler(device.type)
            trainer.scaler.scale(torch.zeros((), device=device))  # a stage without the loss never does
        return trainer

    def batches(self, train: Mixture | Tokens) -> Loader:
        """The micro-batches from here on, made ahead in the background until the loader is closed."""
        t, data, mesh = self.config.training, self.config.data, self.engine.mesh
        ahead = self.guard.samples - self.step * t.batch_size
        return Loader(
            train,
            t.seed,
            first_samples(
                self.step, t.batch_size, t.micro_batch_size, mesh.data_index, mesh.parallel_dims.data, ahead
            ),
            t.micro_batch_size,
            data.sequence_length,
            data.separate_documents,
            pin=self.device.type == "cuda",
        )

    def train_step(
        self,
        batches: Iterator[Batch],
        after_forward: Callable[[torch.Tensor], None] | None = None,
        gauges: Gauges | None = None,
    ) -> tuple[float, float, float]:
        """Take one optimizer step; returns (loss, gradient norm, learning rate).

        The loss is the mean over all targets of the step, however they fall into micro-batches. The guard
        judges loss and norm, and a step that it does not take leaves weights, moments and histories as they
        were; see `verdict` and `first_bad`. `after_forward` is called with the loss between every forward
        pass and its backward pass; `gauges` (of `make_gauges`) read this step.
        """
        t, step = self.config.training, self.step + 1
        engine, mesh = self.engine, self.engine.mesh
        own = t.batch_size // mesh.parallel_dims.data
        firsts = range(mesh.data_index * own, (mesh.data_index + 1) * own, t.micro_batch_size)
        own_batches = [next(batches) for _ in firsts]
        targets = max(engine.sum_over_data(sum(batch.targets for batch in own_batches)), 1)
        micro_batches = [
            MicroBatch(first, batch, batch.targets / targets)
            for first, batch in zip(firsts, own_batches, strict=True)
        ]
        replays = bool(self.guard.rules.replay_every) and step % self.guard.rules.replay_every == 0
        if replays:
            rehearsed = step_fingerprint(self._accumulate(micro_batches), self.names)
            discard_step(self.model)
        total = self._accumulate(micro_batches, after_forward, gauges)
        if replays:
            require_same_replay(rehearsed, step_fingerprint(total, self.names), step)
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
            engine.all_reduce_overflow(self.scaler, self.optimizer)
        if gauges is not None:
            gauges.after_backward()
        norm = self.optimizer.clip_grad_norm_(self.config.optimizer.clip_norm).item()
        lr, loss = self.learning_rate(step), engine.sum_over_ranks([total.item()])[0]
        self.verdict = self.guard.judge(loss, norm)
        if self.verdict.takes:
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            engine.after_update()
        if gauges is not None:
            gauges.after_step()
        self.first_bad = None if self.verdict.is_finite else self._find_first_bad(micro_batches)
        if not self.verdict.takes:
            discard_step(self.model)
        if self.scaler:
            self.scaler.update()
        self.step, self.guard.samples = step, self.guard.samples + t.batch_size
        return loss, norm, lr

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        after_forward: Callable[[torch.Tensor], None] | None = None,
        observer: Gauges | NanTracer | None = None,
    ) -> torch.Tensor:
        """Leave the next step's gradients on the parameters; returns its loss here, a 0-dim tensor."""
        t = self.config.training
        self.optimizer.zero_grad(set_to_none=True)

        def begin(i: int) -> None:
            set_step(self.model, t.seed, self.step + 1, micro_batches[i].first, t.steps)
            if observer is not None:
                observer.begin_micro_batch(i == 0, i == len(micro_batches) - 1)

        def scale(loss: torch.Tensor) -> torch.Tensor:
            return self.scaler.scale(loss) if self.scaler else loss

        total = self.engine.accumulate(micro_batches, begin, scale, after_forward)
        self.engine.finish_backward()
        return total

    def _find_first_bad(self, micro_batches: Sequence[MicroBatch]) -> FirstBad:
        """Compute the step that was just judged again, and look where it goes wrong, on whatever process."""
        if self.config.training.compile:
            return COMPILED
        discard_step(self.model)
        with NanTracer(self.model, self.engine.rank) as look:
            look.state(self.tensors())
            self._accumulate(micro_batches, look.after_forward, look)
            look.after_backward()
        return earliest([FirstBad(**one) for one in self.engine.gather(look.first.as_json())])

    def learning_rate(self, step: int) -> float:
        """That of optimizer step `step`."""
        s = self.config.schedule
        return learning_rate(
            step,
            lr=self.config.optimizer.lr,
            steps=self.config.training.steps,
            kind=s.kind,
            warmup_steps=s.warmup_steps,
            final_lr_fraction=s.final_lr_fraction,
            decay_fraction=s.decay_fraction,
            decay_steps=s.decay_steps,
        )

    def make_gauges(self) -> Gauges:
        """Gauges for one step: of every linear layer, and of the state of every matrix."""
        layers = {name: m for name, m in self.model.named_modules() if isinstance(m, Linear)}
        state: dict[tuple[str, str], QuantizedState | torch.Tensor] = {}
        for p, name in self.names.items():
            if p.ndim < 2:
                continue
            at_rest = {place: getattr(p, key, None) for place, key in AT_REST.items()}
            places = {"weight": p} | {k: v for k, v in at_rest.items() if v is not None}
            places |= self.optimizer.moments(p)
            state |= {(name.removesuffix(".weight"), place): tensor for place, tensor in places.items()}
        return Gauges(layers, state)

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Of the parameters."""
        return {p: name for name, p in self.model.named_parameters()}

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """All tensors that a checkpoint holds, by group and name: the session's own."""
        groups = {
            "model": {n: stored_tensor(p) for n, p in self.model.named_parameters(remove_duplicate=False)},
            "optimizer": self.optimizer.tensors(self.names),
        }
        of_recipe = recipe_tensors(self.model)
        return groups | ({"recipe": of_recipe} if of_recipe else {})

    def pieces(self) -> LocalTensors:
        """The same, as what this process holds of the whole run's."""
        return local_tensors_of(self.tensors(), dict(self.model.named_parameters(remove_duplicate=False)))

    def check_replicas(self) -> None:
        """Compare what several processes hold alike, bit for bit; raises `Corrupted` where it is not."""
        if self.engine.mesh.is_alone:
            return
        here = {
            group: {f"{name} from {piece.offset}": piece.tensor for name, of in named.items() for piece in of}
            for group, named in self.pieces().items()
        }
        require_same_replicas(common(self.engine.gather(fingerprint(here))), self.step)

    def state(self) -> dict[str, JSON]:
        """All else that a checkpoint holds; the same on every process."""
        state: dict[str, JSON] = {"guard": self.guard.state()}
        return state | ({"loss_scaling": self.scaler.state_dict()} if self.scaler else {})

    def save(self, checkpoints: Path, run_id: str, group: dist.ProcessGroup | None = None) -> Path:
        """Publish the state after `step` steps; see `checkpoint.save_distributed` for what it may raise."""
        keep = self.config.checkpoint.keep
        return save_distributed(checkpoints, self.step, self.pieces(), self.state(), keep, run_id, group)

    def restore(self, path: Path, group: dist.ProcessGroup | None = None) -> None:
        """Go back to the state in a checkpoint, whoever made it; all processes of `group` together."""
        with torch.no_grad():
            checkpoint = restore_distributed(path, self.pieces(), group)
        self.engine.after_update()
        set_step(self.model, self.config.training.seed, checkpoint.step, 0, self.config.training.steps)
        self.step = checkpoint.step
        taken = self.step * self.config.training.batch_size
        self.guard = Guard.from_state(self.config.guard, checkpoint.state, taken)
        if self.scaler:
            self.scaler.load_state_dict(checkpoint.state["loss_scaling"])
