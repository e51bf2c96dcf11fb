"""A plugin for axolotl, named in its YAML file.

    plugins:
      - narrowgauge.integrations.axolotl.NarrowgaugePlugin
    narrowgauge:
      recipe: nvfp4
      keep: [lm_head]

The model is converted before adapters are added. The optimizer is `narrowgauge.AdamW` with axolotl's
`learning_rate`, `adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay`; `optimizer:` is ignored.
Everything else is `narrowgauge.integrations.transformers`, since axolotl uses that trainer.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict

from narrowgauge.integrations.transformers import NarrowTrainerCallback, TrainerAdamW
from narrowgauge.nn import convert
from narrowgauge.system.errors import UserError


class NarrowgaugeBlock(BaseModel):
    """The block `narrowgauge:` of the YAML file.

    Attributes:
        recipe: The name of a recipe, or the path of its TOML file.
        keep: Layers that stay in the recipe's `compute` format.
        seed: The seed of random bits.
        gauges_every: Read the gauges every n-th step; 0 for never.
        decay_step: The first step whose learning rate is below the peak, for rules that start there.
    """

    model_config = ConfigDict(extra="forbid")

    recipe: str
    keep: list[str] = []
    seed: int = 0
    gauges_every: int = 0
    decay_step: int | None = None


class NarrowgaugeArgs(BaseModel):
    """The plugin's addition to axolotl's configuration."""

    narrowgauge: NarrowgaugeBlock | None = None


class NarrowgaugePlugin(BasePlugin):  # type: ignore[misc, unused-ignore]
    """Runs an axolotl training under a recipe."""

    def get_input_args(self) -> str:
        """The import path of the configuration class."""
        return "narrowgauge.integrations.axolotl.NarrowgaugeArgs"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Convert the model in place, before adapters are added."""
        block = _block(cfg)
        for key in ("deepspeed", "fsdp", "fsdp_config", "fp8"):
            if cfg.get(key):
                raise UserError(
                    f"{key} in the configuration takes the parameters apart, or narrows them by other means "
                    "than the recipe: leave it out and train with DDP, which works under any recipe"
                )
        convert(model, block.recipe, block.keep)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Give the trainer its optimizer and the callback."""
        block, args = _block(cfg), trainer.args
        arguments = {"recipe": block.recipe, "seed": block.seed, "narrow_model": trainer.model}
        callback = NarrowTrainerCallback(block.seed, block.gauges_every, arguments, block.decay_step)
        callback.on_init_end(args, trainer.state, trainer.control, model=trainer.model)  # too late for it
        trainer.optimizer_cls_and_kwargs = (TrainerAdamW, arguments)
        return [callback]


def _block(cfg: Any) -> NarrowgaugeBlock:
    """The `narrowgauge:` block of a configuration, which axolotl passes as nested dicts."""
    given = cfg.get("narrowgauge")
    if not given:
        raise UserError(
            "the plug-in is named and the YAML file has no block `narrowgauge:`; add one with "
            "`recipe: mxfp8`, or take the plug-in out"
        )
    return NarrowgaugeBlock.model_validate(dict(given))
