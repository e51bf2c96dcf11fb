"""What a recipe does in a run's model, beside its casts: layers that stay wide, blocks that are cut."""

from narrowgauge.models import ModelConfig
from narrowgauge.recipes import Recipe, cut_blocks, kept_text, resolve
from narrowgauge.training.outline import outline_of_model


def placement(model: ModelConfig, recipe: Recipe, tokens: int) -> list[str]:
    """A sentence for each, as a run prints and records them; `tokens` are those of a micro-batch."""
    plan = resolve(recipe, outline_of_model(model))
    return [line for line in (kept_text(plan), *cut_blocks(plan, tokens)) if line]
