"""What a recipe does in a run's model, beside its casts: layers that stay wide, blocks that are cut."""

from narrowgauge.recipes import cut_blocks, kept_text
from narrowgauge.training.config.config import Config
from narrowgauge.training.config.outline import outline_of_model


def placement(config: Config) -> list[str]:
    """A sentence for each, as a run prints and records them."""
    recipe, outline = config.spec.recipe, outline_of_model(config.spec.model)
    tokens = config.training.micro_batch_size * config.data.sequence_length
    lines = [kept_text(recipe, outline), *cut_blocks(recipe, outline, tokens)]
    return [line for line in lines if line]
