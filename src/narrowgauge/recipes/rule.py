"""A `Rule`: other casts in some layers of a model, or from some time on."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil

from narrowgauge.recipes.places import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Places):
    """Other casts in some layers, or from some time on.

    A layer is selected by any of `modules`, `first_blocks` and `last_blocks`; all empty = every layer.

    Attributes:
        keeps_state: Whether weights, masters and gradients of the selected layers stay in fp32, also on the
            wire.
        modules: Patterns of module names, compared with the whole name and with its last component.
        first_blocks: Blocks from the beginning of the model (`nn.outline_of`): a float is a share of them,
            rounded up, an integer their number.
        last_blocks: The same from its end.
        from_step: The first optimizer step (from 1) in which the rule holds.
        from_share: The share of the run's steps after which it holds.
        from_decay: Whether it holds only once the learning rate falls.
        until_step: The first optimizer step in which it no longer holds; 0 for none.
        until_share: The share of the run's steps after which it no longer holds; 0 for none.
        until_decay: Whether it no longer holds once the learning rate falls.
    """

    keeps_state: bool = False
    modules: tuple[str, ...] = ()
    first_blocks: float = 0
    last_blocks: float = 0
    from_step: int = 0
    from_share: float = 0.0
    from_decay: bool = False
    until_step: int = 0
    until_share: float = 0.0
    until_decay: bool = False

    def selects(self, name: str, block: int | None, blocks: int) -> bool:
        """Whether the rule selects the layer called `name`, in block number `block` of `blocks`."""
        if self.is_for_all:
            return True
        if any(matches(name, pattern) for pattern in self.modules):
            return True
        if block is None:
            return False
        first, last = number_of_blocks(self.first_blocks, blocks), number_of_blocks(self.last_blocks, blocks)
        return block < first or block >= blocks - last

    @property
    def is_for_all(self) -> bool:
        """Whether the rule selects every layer."""
        return not (self.modules or self.first_blocks or self.last_blocks)

    @property
    def is_timed(self) -> bool:
        """Whether the rule starts or ends at a step."""
        shares = self.from_share > 0 or self.until_share > 0
        return self.from_step > 1 or self.until_step > 0 or shares or self.follows_schedule

    @property
    def needs_length(self) -> bool:
        """Whether the rule depends on the number of the run's steps."""
        return self.from_share > 0 or self.until_share > 0

    @property
    def follows_schedule(self) -> bool:
        """Whether the rule depends on the step from which the learning rate falls."""
        return self.from_decay or self.until_decay

    def holds(self, step: int, steps: int | None, decay: int | None = None) -> bool:
        """Whether the rule holds in an optimizer step.

        Args:
            step: The step, from 1.
            steps: The steps of the run; None if unknown, so that no share is ever reached.
            decay: The first step whose learning rate is below the peak; None if there is none.
        """

        def is_after(share: float) -> bool:
            return steps is not None and step > share * steps

        falls = decay is not None and step >= decay
        begins = step >= self.from_step and (not self.from_share or is_after(self.from_share))
        ends = (self.until_step and step >= self.until_step) or (
            self.until_share and is_after(self.until_share)
        )
        return begins and (falls or not self.from_decay) and not (ends or (falls and self.until_decay))


def without_moot(rules: Sequence[Rule]) -> list[Rule]:
    """The rules of a layer, without timed ones that later untimed rules override completely."""
    left: list[Rule] = []
    final: set[str] = set()  # places that such a later rule sets
    for rule in reversed(rules):
        places = set(rule.places)
        if not rule.is_timed:
            final |= places
        elif places <= final and not rule.keeps_state:
            continue
        left.insert(0, rule)
    return left


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name, or its last component, fits a pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def number_of_blocks(requested: float, blocks: int) -> int:
    """A number of blocks, or a share of them rounded up; 0.28 * 25 is 7.000000000000001."""
    return requested if isinstance(requested, int) else ceil(round(requested * blocks, 6))
