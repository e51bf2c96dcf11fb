"""What a recipe does in a run's model, beside its casts: layers that stay wide, blocks that are cut."""

from narrowgauge.models import ModelConfig
from narrowgauge.recipes import Recipe, cut_blocks, kept_text
from narrowgauge.training.outline import outline_of_model


def placement(model: ModelConfig, recipe: Recipe, tokens: int) -> list[str]:
    """A sentence for each, as a run prints and records them; `tokens` are those of a micro-batch."""
    outline = outline_of_model(model)
    lines = [kept_text(recipe, outline), *cut_blocks(recipe, outline, tokens)]
    return [line for line in lines if line]
