"""A precision plugin for Lightning's `Trainer` and for Fabric.

    Trainer(plugins=[NarrowPrecision("nvfp4")])          Fabric(plugins=[NarrowPrecision("nvfp4")])

It converts the model when Lightning sets it up, before the optimizer is made. Before each forward pass that
records gradients it sets the step and the sequences. `narrowgauge.AdamW` in `configure_optimizers` keeps the
optimizer's state in the recipe's formats. Lightning's checkpoints include the state of the plugin; with
Fabric, add it to the state to be saved:

    fabric.save(path, {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision})
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision

from narrowgauge.distributed import prepare_ddp
from narrowgauge.nn import convert, set_step
from narrowgauge.optim import load_recipe_state, recipe_state
from narrowgauge.recipes import RecipeLike
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import tensors_in


class NarrowPrecision(Precision):  # type: ignore[misc, unused-ignore]
    """Computes the linear layers of a model under a recipe.

    Attributes:
        step: The current step, from 1.
        first_sample: Sequences of this step computed before this forward pass, on all processes.
    """

    precision = "32-true"  # of everything outside the recipe; Lightning requires one of its words

    def __init__(
        self,
        recipe: RecipeLike,
        *,
        keep: str | Sequence[str] = (),
        seed: int = 0,
        steps: int | None = None,
        decay_step: int | None = None,
    ) -> None:
        """Take a recipe.

        Args:
            recipe: A recipe, its name, or the path of its TOML file.
            keep: Layers that stay in the recipe's `compute` format, as for `narrowgauge.convert`.
            seed: The seed of random bits.
            steps: The steps of the full run, for rules that apply after a share of it.
            decay_step: The first step whose learning rate is below the peak, for rules that wait for it.
        """
        self.recipe, self.keep, self.seed = recipe, keep, seed
        self.steps, self.decay_step = steps, decay_step
        self.step, self.first_sample = 1, 0
        self.samples = 0  # of the next forward pass
        self.model: torch.nn.Module | None = None

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert the linear layers of a model in place, and let DDP sum low-precision gradients."""
        if self.model is not None and self.model is not module:
            raise UserError(
                "one NarrowPrecision counts the steps of one model: put all models of the training into one "
                "module, or convert the others with narrowgauge.convert"
            )
        self.model = convert(module, self.recipe, self.keep)
        if dist.is_initialized() and dist.get_world_size() > 1:
            prepare_ddp(self.model)
        return self.model

    def convert_input(self, data: Any) -> Any:
        """Count the sequences of a batch, which is returned unchanged."""
        batches = [tensor.shape[0] for tensor in tensors_in(data) if tensor.ndim]
        self.samples = batches[0] if batches else 1
        return data

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Set the step and the sequences of a forward pass that records gradients."""
        if torch.is_grad_enabled() and self.model is not None:
            rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            first_sample = self.first_sample + rank * self.samples
            set_step(self.model, self.seed, self.step, first_sample, self.steps, self.decay_step)
            self.first_sample += world * self.samples
        yield

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Take a step with the gradients that the closure computes; Fabric gives none."""
        if closure is None:
            result = optimizer.step(**kwargs)
        else:
            result = self._wrap_closure(model, optimizer, closure)
            if not model.automatic_optimization or result is not None:  # None: the step was to be skipped
                optimizer.step(**kwargs)
        self.step, self.first_sample = self.step + 1, 0
        return result

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, through the hook of a LightningModule if the model is one."""
        if isinstance(model, LightningModule):
            super().backward(tensor, model, *args, **kwargs)
        else:
            tensor.backward(*args, **kwargs)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Call Lightning's hooks, which models of Fabric lack."""
        return super().pre_backward(tensor, module) if isinstance(module, LightningModule) else tensor

    def post_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Call Lightning's hooks, which models of Fabric lack."""
        is_lightning = isinstance(module, LightningModule)
        return super().post_backward(tensor, module) if is_lightning else tensor.detach()

    def state_dict(self) -> dict[str, Any]:
        """The step and the recipe's state in the model, as between two steps."""
        recipe = {} if self.model is None else recipe_state(self.model)
        return {"step": self.step, **recipe}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict`, after the model's weights have been loaded.

        Raises:
            UserError: The model is not set up yet, or the state belongs to another model or recipe.
        """
        if self.model is None:
            raise UserError(
                "the state of NarrowPrecision goes into a model: call fabric.setup before fabric.load"
            )
        load_recipe_state(self.model, state_dict)
        self.step, self.first_sample = state_dict["step"], 0
