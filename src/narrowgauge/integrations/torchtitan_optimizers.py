"""torchtitan's optimizers, for a model whose linear layers are under a recipe.

torchtitan builds its optimizers last, around the parts of the model that this process trains, and has no hook
for other code in a step. So these optimizers set the step and the sequences of each forward pass, on which
random bits, delayed scales and waiting rules depend. Their part of a checkpoint holds the number of steps and
the histories of delayed scales, along with torchtitan's keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from narrowgauge.nn import Linear, recipe_tensors, set_step
from narrowgauge.nn.histories import reduce_histories
from narrowgauge.system.errors import UserError

PREFIX = "narrowgauge."  # of keys in the optimizer's part of a checkpoint


class NarrowOptimizers(OptimizersContainer):  # type: ignore[misc, unused-ignore]
    """torchtitan's optimizers, which count the steps and pass the step to the recipe's layers.

    Attributes:
        steps_taken: The optimizer steps that the model has taken.
        samples: Sequences of this step that each part of the model has computed, on all processes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc, unused-ignore]
        """Torchtitan's configuration of optimizers, with the options of a recipe."""

        seed: int = 0
        total_steps: int | None = None
        decay_step: int | None = None

    def __init__(self, config: Any, *, model_parts: list[torch.nn.Module]) -> None:
        self.config, self.steps_taken = config, 0
        self.samples: dict[torch.nn.Module, int] = {}
        super().__init__(config, model_parts=model_parts)
        for part in model_parts:
            part.register_forward_pre_hook(self._begin_pass)

    def _begin_pass(self, part: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Set the step and the sequences of a forward pass that records gradients."""
        if not (torch.is_grad_enabled() and part.training):
            return
        layers = [module for module in part.modules() if isinstance(module, Linear)]
        if any(layer.is_random or layer.histories or layer.recipe.rules for layer in layers):
            _refuse_graphs()
        rank, world = _rank_and_world(layers)
        done, count = self.samples.get(part, 0), inputs[0].shape[0]
        config, step = self.config, self.steps_taken + 1
        set_step(part, config.seed, step, done + rank * count, config.total_steps, config.decay_step)
        self.samples[part] = done + world * count

    def step(self, closure: None = None) -> None:
        """Take a step, and merge the histories of all processes."""
        for part in self.model_parts:
            for group in _groups(part):
                reduce_histories(part.modules(), group)
        super().step(closure)
        self.steps_taken += 1
        self.samples.clear()

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' state, the number of steps, and the histories of delayed scales."""
        return {**super().state_dict(), **self._own_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        own = self._own_state()
        for key, tensor in own.items():
            tensor.copy_(state_dict[key])
        self.steps_taken = int(own[f"{PREFIX}steps_taken"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in own})

    def _own_state(self) -> dict[str, torch.Tensor]:
        state = {f"{PREFIX}steps_taken": torch.tensor(self.steps_taken)}
        for part in self.model_parts:
            tensors = recipe_tensors(part)
            state |= {f"{PREFIX}{canonical_fqn(name)}": tensor for name, tensor in tensors.items()}
        return state


def _refuse_graphs() -> None:
    """Refuse capture in a CUDA graph, which would replay one step's random bits and scales forever."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UserError(
            "a CUDA graph would replay the random bits, scales and rules of one step in all others: set "
            "--training.disable_cuda_graphs, or take a recipe without them, such as fp8 or mxfp8"
        )


def _mesh(layers: list[Linear]) -> DeviceMesh | None:
    """The processes that divide the batch, as in FSDP2; None before FSDP2 has sharded a weight."""
    weights = (layer.weight for layer in layers)
    return next((weight.device_mesh for weight in weights if isinstance(weight, DTensor)), None)


def _rank_and_world(layers: list[Linear]) -> tuple[int, int]:
    """The index of this process among those that divide the batch, and their number."""
    if (mesh := _mesh(layers)) is None:
        return 0, 1
    return mesh.mesh.flatten().tolist().index(dist.get_rank()), mesh.size()


def _groups(part: torch.nn.Module) -> list[dist.ProcessGroup]:
    mesh = _mesh([module for module in part.modules() if isinstance(module, Linear)])
    return [] if mesh is None else [mesh.get_group(i) for i in range(mesh.ndim)]
