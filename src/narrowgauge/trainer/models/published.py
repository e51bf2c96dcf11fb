"""How named models were trained by their authors: batch, rate, schedule, tokens, and the source."""

import math
from dataclasses import dataclass
from functools import cache

from narrowgauge.system.files import shipped_text
from narrowgauge.system.toml_text import parse_toml
from narrowgauge.trainer.models.sizes import ALIASES


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The published training of a model."""

    sequence_length: int  # tokens of a sequence
    batch_size: int  # sequences of an optimizer step
    lr: float  # the peak of the learning rate
    warmup_steps: int  # steps of the linear rise
    final: float  # the share of the peak at the end
    tokens: float  # tokens of the whole training
    source: str  # the paper or script
    weight_decay: float | None = None  # that of AdamW; None where it is not published
    note: str = ""  # what was not published, and is taken from elsewhere

    @property
    def steps(self) -> int:
        """The optimizer steps of all tokens."""
        return math.ceil(self.tokens / (self.batch_size * self.sequence_length))


@cache
def _table() -> dict[str, Published]:
    table = parse_toml(shipped_text("trainer/models", "published"), "published.toml")
    return {name: Published(**facts) for name, facts in table.items()}


def published_names() -> list[str]:
    """The models whose training is published."""
    return list(_table())


def published(name: str) -> Published | None:
    """The published training of a named model; None where none was published."""
    return _table().get(ALIASES.get(str(name), str(name)))
