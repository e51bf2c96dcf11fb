"""The state of a run, and how it is saved to a checkpoint and restored bit for bit.

The trajectory is a function of the configuration and of: the weights, the optimizer's moments and step
counts, the number of steps done, and the guard's state. Token order and random bits are pure functions of
seed and step (and of how much data the guard has skipped), so there is no generator, cursor or loader state
to save.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from narrowgauge.checkpoint import JSON, LocalTensors, SavePlan, plan_save, restore_distributed
from narrowgauge.distributed import Engine
from narrowgauge.errors import UserError
from narrowgauge.guard import Guard
from narrowgauge.models import Transformer
from narrowgauge.nn import recipe_tensors
from narrowgauge.optim import Optimizer
from narrowgauge.quantization import stored_tensor
from narrowgauge.recipes import Recipe
from narrowgauge.training.plan import TrainingPlan
from narrowgauge.training.step.build_model import go_to
from narrowgauge.training.step.checkpoint_slices import local_tensors_of
from narrowgauge.training.step.replica_check import common, fingerprint_local, require_same_replicas


@dataclass
class TrainState:
    """Everything that changes from step to step; with several processes, the local shard of it."""

    plan: TrainingPlan
    device: torch.device
    model: Transformer
    optimizer: Optimizer
    engine: Engine
    guard: Guard
    step: int = 0  # the number of steps done
    scaler: torch.amp.GradScaler | None = None  # the loss scaling, if gradients pass through fp16

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter."""
        return {p: name for name, p in self.model.named_parameters()}

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run, without the guard's raises."""
        return self.plan.spec.recipe

    @property
    def keep(self) -> int:
        """The number of valid checkpoints to keep."""
        return self.plan.keep

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of a checkpoint by group and name, as this process holds them (not copied)."""
        groups = {
            "model": {n: stored_tensor(p) for n, p in self.model.named_parameters(remove_duplicate=False)},
            "optimizer": self.optimizer.tensors(self.names),
        }
        of_recipe = recipe_tensors(self.model)
        return groups | ({"recipe": of_recipe} if of_recipe else {})

    def local_tensors(self) -> LocalTensors:
        """The same tensors, each as local slices of the global tensor."""
        return local_tensors_of(self.tensors(), dict(self.model.named_parameters(remove_duplicate=False)))

    def state(self) -> dict[str, JSON]:
        """The rest of a checkpoint, which is the same on every process."""
        state: dict[str, JSON] = {"guard": self.guard.state()}
        return state | ({"loss_scaling": self.scaler.state_dict()} if self.scaler else {})

    def check_replicas(self) -> None:
        """Compare the tensors that several processes hold, bit for bit.

        Raises:
            Corrupted: two copies differ.
        """
        if self.engine.mesh.is_alone:
            return
        fingerprints = self.engine.gather(fingerprint_local(self.local_tensors()))
        require_same_replicas(common(fingerprints), self.step)

    def plan_save(self, checkpoints: Path, run_id: str, group: dist.ProcessGroup | None = None) -> SavePlan:
        """Plan a checkpoint of the state after `step` steps; all processes of `group` together."""
        tensors, state = self.local_tensors(), self.state()
        return plan_save(checkpoints, self.step, tensors, state, self.keep, run_id, group)

    def save(self, checkpoints: Path, run_id: str, group: dist.ProcessGroup | None = None) -> Path:
        """Publish the state after `step` steps; raises the errors of `checkpoint.SavePlan.write`."""
        return self.plan_save(checkpoints, run_id, group).write()

    def fill(self, path: Path, group: dist.ProcessGroup | None) -> None:
        """Fill the state from a checkpoint made under the recipe of the model."""
        with torch.no_grad():
            checkpoint = restore_distributed(path, self.local_tensors(), group)
        self.engine.after_update()
        go_to(self.model, self.plan, checkpoint.step, 0)
        self.step = checkpoint.step
        taken = self.step * self.plan.spec.batch_size
        self.guard = Guard.from_state(self.plan.guard, checkpoint.state, taken)
        if self.scaler:
            if "loss_scaling" not in checkpoint.state:
                raise UserError(
                    f"the checkpoint of step {self.step} is of another recipe: it has no loss scale, which "
                    "this one keeps; use its own, or `train --branch` to continue under another"
                )
            self.scaler.load_state_dict(checkpoint.state["loss_scaling"])
