"""torchtitan's trainer under a recipe: overrides for its command line, a converter for its configurations.

    torchtitan_train --module llama3 --config llama3_8b \\
        --override.imports 'narrowgauge.integrations.torchtitan.narrow_linear={"recipe": "nvfp4"}' \\
                           narrowgauge.integrations.torchtitan.narrow_optimizer

`narrow_linear` takes the configuration of the whole model, since a recipe's rules refer to names and block
numbers. It builds the model once on the meta device, converts it by `narrowgauge.convert`, and writes each
layer's result into the configuration of that layer. So torchtitan still builds the layers, in its usual
order: meta device, sharding, checkpointing, compiler, FSDP2, then initialization.

`narrow_optimizer` replaces torchtitan's optimizers by `NarrowOptimizers`, which set the step. The model's
part of a checkpoint has the names and the fp32 weights that torchtitan writes without a recipe.

Versions: torchtitan 0.3. Weights, masters, gradients and moments are torchtitan's, in fp32.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import derive, override
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module

from narrowgauge.integrations.torchtitan_optimizers import NarrowOptimizers
from narrowgauge.nn import Linear, convert
from narrowgauge.nn.histories import AmaxHistory, ChannelChoice, HeldAmax, History
from narrowgauge.recipes import Recipe, RecipeLike
from narrowgauge.system.errors import UserError

OPTIMIZER = "narrowgauge.integrations.torchtitan.narrow_optimizer"


@dataclass(frozen=True)
class LayerRecipe:
    """The result of `narrowgauge.convert` for a layer."""

    recipe: Recipe  # the layer's recipe
    model_recipe: Recipe  # the model's recipe
    index: int  # the layer's number, which selects its random streams

    def to_dict(self) -> dict[str, Any]:
        """The entry in torchtitan's printed configuration."""
        return {"recipe": self.recipe.name, "is_narrow": self.recipe.is_narrow, "index": self.index}


class NarrowLinear(Linear, TitanLinear):  # type: ignore[misc, unused-ignore]
    """torchtitan's linear layer, under a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):  # type: ignore[misc, unused-ignore]
        """Torchtitan's configuration of a linear layer, with the layer's recipe."""

        narrow: LayerRecipe

    def __init__(self, config: Any) -> None:
        plain = torch.nn.Linear(config.in_features, config.out_features, bias=config.bias)
        narrow: LayerRecipe = config.narrow
        super().__init__(plain, narrow.recipe, narrow.index, model_recipe=narrow.model_recipe)
        for history in self.histories.values():
            history.__class__ = _HISTORIES[type(history)]
        self.keys = self.first_sample = None  # set at initialization; torchtitan asks how buffers are sharded

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        """Make the random keys, after the weight is initialized."""
        self._set_keys(0, 0, 0)

    def parallelize(self, parallel_dims: Any) -> None:
        """Let torchtitan distribute the layer over data-parallel processes."""
        for degree, name in ((parallel_dims.tp, "tensor"), (parallel_dims.cp, "context")):
            if degree > 1:
                raise UserError(
                    f"parallelism.{name}_parallel_degree is {degree}, and a recipe's blocks would be laid on "
                    "parts of the tensors there: set it to 1 and take data_parallel_shard_degree or "
                    "data_parallel_replicate_degree"
                )
        super().parallelize(parallel_dims)

    def begin_pass(self) -> bool:
        """Begin a forward pass."""
        if (self.is_random or self.histories) and not self.step_is_set and torch.is_grad_enabled():
            raise UserError(
                f"recipe {self.recipe.name!r} has random bits or delayed scales, which follow the step: add "
                f"{OPTIMIZER} to override.imports, or take a recipe without them, such as fp8 or mxfp8"
            )
        return super().begin_pass()


#: Each kind of history, as a module of torchtitan's.
_HISTORIES: dict[type[History], Any] = {
    kind: type(kind.__name__, (kind, Module), {}) for kind in (AmaxHistory, HeldAmax, ChannelChoice)
}


@override(  # type: ignore[untyped-decorator, unused-ignore]
    target=BaseModel.Config, description="Linear layers compute under a recipe of narrowgauge."
)
def narrow_linear(cfg: Any, *, recipe: RecipeLike, keep: list[str] | None = None) -> Any:
    """Put the linear layers of a model's configuration under a recipe.

    Args:
        cfg: A model configuration of torchtitan; its linear layers are replaced in place.
        recipe: A recipe, its name, or the path of its TOML file.
        keep: Layers that stay in the recipe's `compute` format, as for `narrowgauge.convert`.

    Returns:
        `cfg`.

    Raises:
        UserError: The recipe keeps weights or gradients in low precision, a layer has a custom forward pass,
            or `narrowgauge.convert` refuses.
    """
    with torch.device("meta"):
        model = convert(cfg.build(), recipe, keep or ())
    found = cfg.traverse(TitanLinear.Config)
    stock = {name: place for name, *place in found if type(place[0]) is TitanLinear.Config}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    for name, layer in layers.items():
        if layer.state_at_rest is not None:
            raise UserError(
                f"recipe {layer.model_recipe.name!r} keeps weights or gradients in low precision, which "
                "torchtitan's FSDP and optimizers do not support: take a recipe whose weights and gradients "
                "are fp32 (fp8, mxfp8, nvfp4, coat and others), or narrowgauge.fully_shard in a custom loop"
            )
        if layer.recipe.is_narrow and name not in stock:
            raise UserError(
                f"layer {name!r} has a custom forward pass in torchtitan, which a recipe cannot take "
                f'over: keep it wide with "keep": [{name!r}], or leave out what put it there'
            )
    for name in (name for name in layers if name in stock):
        config, parent, attribute = stock[name]
        layer = layers[name]
        narrow = LayerRecipe(layer.recipe, layer.model_recipe, layer.index)
        new = derive(config, NarrowLinear.Config, narrow=narrow)
        if isinstance(parent, list):
            parent[attribute] = new
        else:
            setattr(parent, attribute, new)
    return cfg


class NarrowConverter(QuantizationConverter):  # type: ignore[misc, unused-ignore]
    """`narrow_linear` for the `converters` of a configuration function, placed before a LoRA converter."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):  # type: ignore[misc, unused-ignore]
        """The arguments of `narrow_linear`."""

        recipe: str
        keep: list[str] = field(default_factory=list)

    def __init__(self, config: Any) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Put the linear layers of a model's configuration under the recipe."""
        return narrow_linear(model_config, recipe=self.config.recipe, keep=self.config.keep)


@override(  # type: ignore[untyped-decorator, unused-ignore]
    target=OptimizersContainer.Config, description="Optimizers that set the step for a recipe of narrowgauge."
)
def narrow_optimizer(
    cfg: Any, *, seed: int = 0, total_steps: int | None = None, decay_step: int | None = None
) -> Any:
    """Replace the configured optimizers by ones that set the step.

    Args:
        cfg: torchtitan's configuration of optimizers.
        seed: The seed of random bits.
        total_steps: The steps of the run, for rules that apply after a share of it.
        decay_step: The first step whose learning rate is below the peak, for rules that start there.

    Raises:
        UserError: The optimizers are not of torchtitan's standard class.
    """
    if type(cfg) is not OptimizersContainer.Config:
        raise UserError(
            f"the configuration's optimizers are {type(cfg).__qualname__}, which narrow_optimizer would "
            "replace: take torchtitan's OptimizersContainer, or leave narrow_optimizer out under a recipe "
            "without random bits and delayed scales, such as fp8 or mxfp8"
        )
    arguments = {"seed": seed, "total_steps": total_steps, "decay_step": decay_step}
    return derive(cfg, NarrowOptimizers.Config, **arguments)
