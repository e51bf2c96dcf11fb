"""Other casts in some layers of a model, or from some time on: a `Rule`."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil

from narrowgauge.quantization import Cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Other casts in some layers, or from some time on.

    A layer is selected by any of `modules`, `first_blocks` and `last_blocks`; all empty = every layer.

    Attributes:
        casts: The cast of each place that the rule changes.
        keeps_state: Whether weights, masters and gradients of the selected layers stay in fp32, on the wire
            too.
        modules: Patterns of module names, compared with the whole name and with its last component.
        first_blocks: Blocks from the beginning of the model's longest module list: a float is a share of
            them, rounded up, an integer their number.
        last_blocks: The same from its end.
        from_step: The first optimizer step (from 1) in which the rule holds.
        from_share: The share of the run's steps after which it holds.
    """

    casts: Mapping[str, Cast]
    keeps_state: bool = False
    modules: tuple[str, ...] = ()
    first_blocks: float = 0
    last_blocks: float = 0
    from_step: int = 0
    from_share: float = 0.0

    def selects(self, name: str, block: int | None, blocks: int) -> bool:
        """Whether the rule selects the layer called `name`, in block number `block` of `blocks`."""
        if self.is_for_all:
            return True
        if any(matches(name, pattern) for pattern in self.modules):
            return True
        if block is None:
            return False
        first, last = _count(self.first_blocks, blocks), _count(self.last_blocks, blocks)
        return block < first or block >= blocks - last

    @property
    def is_for_all(self) -> bool:
        """Whether the rule selects every layer."""
        return not (self.modules or self.first_blocks or self.last_blocks)

    @property
    def is_timed(self) -> bool:
        """Whether the rule waits for a step."""
        return self.from_step > 1 or self.from_share > 0

    def holds(self, step: int, steps: int | None) -> bool:
        """Whether the rule holds in an optimizer step of a run of `steps` steps (None: unknown length)."""
        if self.from_share and (steps is None or step <= self.from_share * steps):
            return False
        return step >= self.from_step


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name, or its last component, fits a pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _count(requested: float, blocks: int) -> int:
    # 0.28 * 25 is 7.000000000000001
    return requested if isinstance(requested, int) else ceil(round(requested * blocks, 6))
