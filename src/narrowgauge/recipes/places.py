"""The places of a training step: operands of GEMMs and of attention, what is kept, state, and the wire.

A place of attention names a tensor: queries, keys, values, probabilities, and the gradients `do` of p v and
`ds` of q kᵀ. Each is an operand of two or three of the six matmuls (`nn/transformer/places.py`),
which contract different axes of it, so it is quantized for each, with blocks along the axis that this matmul
contracts. A place that a recipe does not name is in `compute`. `stream` is the residual. A `Rule` puts other
casts into places, in some layers or from some time on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import ceil
from typing import NamedTuple

from narrowgauge.quantization import Cast, make_cast

GEMMS = ("fprop", "dgrad", "wgrad")
GEMM_PLACES = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
# The place that quantized the same tensor before, whose values a place may reuse.
SEEN_BEFORE = {"dgrad.w": "fprop.w", "wgrad.x": "fprop.x", "wgrad.dy": "dgrad.dy"}
ATTENTION = "attention"
ATTENTION_PLACES = tuple(f"attention.{tensor}" for tensor in ("q", "k", "v", "p", "do", "ds"))
GRADIENT_PLACES = ATTENTION_PLACES[4:]
STREAM = "stream"
# The storage of state, by default: of the weights of linear layers, and the moments of every large tensor.
# "none" = no second, wider copy of a weight.
STATE_PLACES = ("weight", "master", "grad", "m", "v")
WIRE_PLACES = ("gather", "reduce")  # between devices: weights of linear layers, and their gradients
FP32 = make_cast("fp32")
#: The places that are in fp32 unless a recipe names them, whatever `compute` is.
IN_FP32 = {place: None if place == "master" else FP32 for place in (STREAM, *STATE_PLACES, *WIRE_PLACES)}
PLACES = (*GEMM_PLACES, *ATTENTION_PLACES, "saved", STREAM, *STATE_PLACES, *WIRE_PLACES)
#: The places that gauges measure, in table order. GEMM results have gauges, but recipes cannot name them.
RESULTS = ("fprop.y", "dgrad.dx", "wgrad.dw")
GAUGED_PLACES = (*GEMM_PLACES, *ATTENTION_PLACES, "saved", STREAM, *RESULTS, *STATE_PLACES)
OFFLOADABLE = ("master", "grad", "m", "v")
KEYS = (*PLACES, "offload", "compute", "keep")  # can be overridden in a recipe
COMPUTE = ("bf16", "fp16", "fp32")
# Names of several places, which take one cast for all of them.
GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(place for place in PLACES if place.startswith(f"{group}.")) for group in (*GEMMS, ATTENTION)
}
CAST_TABLE = '{cast = "mxfp4", rounding = "stochastic"}'  # an example, for errors
# What may be kept of a layer's input for its backward pass, besides casts.
SAVED = ("input", "operand")
# Kept channels (`keep_channels`) are columns of a layer's input: the place that chooses them, the places that
# keep them, and the one that has no such channels itself, but is multiplied with those of wgrad.x.
CHOOSES = "fprop.x"
KEEPING = (CHOOSES, "fprop.w", "wgrad.x")
MEETS = "wgrad.dy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What a recipe and its rules have in common: a cast for each of some places.

    Attributes:
        places: The casts by place; None for a master that does not exist, and in attention for `compute`.
    """

    places: Mapping[str, Cast | None]

    def __getitem__(self, place: str) -> Cast:
        """The cast of a place that has one, as in `recipe["stream"]`."""
        cast = self.places[place]
        assert cast is not None, place
        return cast

    @property
    def casts(self) -> dict[str, Cast]:
        """The casts of GEMM places."""
        return {place: cast for place in GEMM_PLACES if (cast := self.places.get(place)) is not None}

    @property
    def attention(self) -> dict[str, Cast | None]:
        """The casts of places of attention; None for `compute`, as for a place that is missing."""
        return {place: self.places[place] for place in ATTENTION_PLACES if place in self.places}

    @property
    def state(self) -> dict[str, Cast | None]:
        """The casts of state places; None for a master that does not exist."""
        return {place: self.places[place] for place in STATE_PLACES if place in self.places}


def wide_operands(compute: str) -> dict[str, Cast | None]:
    """The places of GEMMs and of attention in the compute format."""
    return dict.fromkeys(ATTENTION_PLACES) | dict.fromkeys(GEMM_PLACES, make_cast(compute))


def values_of(place: str) -> Cast:
    """The cast of a place that takes the values of another one as they are, in no format."""
    return replace(make_cast("bf16"), name=place, of=place)


def is_wide(cast: Cast | None, compute: str) -> bool:
    """Whether a place of attention is in the compute format."""
    return cast is None or (not cast.is_scaled and cast.name == compute)


class Moment(NamedTuple):
    """A time in a run: when all of its conditions are met, or where a rule ends, any of them.

    Attributes:
        step: An optimizer step (from 1); 0 for none.
        share: The share of the run's steps that have passed; 0 for none.
        decay: Whether it waits until the learning rate falls.
    """

    step: int = 0
    share: float = 0.0
    decay: bool = False

    def conditions(self, step: int, steps: int | None, decay: int | None) -> Iterator[bool]:
        """Whether each of its conditions is met in an optimizer step (`Rule.holds`)."""
        if self.step:
            yield step >= self.step
        if self.share:
            yield steps is not None and step > self.share * steps
        if self.decay:
            yield decay is not None and step >= decay


UNSET = Moment()


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
        start: From when on the rule holds.
        until: From when on it no longer holds.
    """

    keeps_state: bool = False
    modules: tuple[str, ...] = ()
    first_blocks: float = 0
    last_blocks: float = 0
    start: Moment = UNSET
    until: Moment = UNSET

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
    def clock(self) -> dict[str, int | float | str]:
        """The keys of a recipe that say when it holds: `from_step`, `from_share`, `from`, and its end's."""
        found: dict[str, int | float | str] = {}
        for word, (step, share, decay) in (("from", self.start), ("until", self.until)):
            found |= {f"{word}_step": step, f"{word}_share": share, word: "decay" if decay else ""}
        return {key: value for key, value in found.items() if value}

    @property
    def is_timed(self) -> bool:
        """Whether the rule starts or ends at a step."""
        return bool(self.clock) and self.clock != {"from_step": 1}

    @property
    def follows_schedule(self) -> bool:
        """Whether the rule depends on the step from which the learning rate falls."""
        return self.start.decay or self.until.decay

    def holds(self, step: int, steps: int | None, decay: int | None = None) -> bool:
        """Whether the rule holds in an optimizer step.

        Args:
            step: The step, from 1.
            steps: The steps of the run; None if unknown, so that no share is ever reached.
            decay: The first step whose learning rate is below the peak; None if there is none.
        """
        now = step, steps, decay
        return all(self.start.conditions(*now)) and not any(self.until.conditions(*now))


def matches(name: str, pattern: str) -> bool:
    """Whether a module's name, or its last component, fits a pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def number_of_blocks(requested: float, blocks: int) -> int:
    """A number of blocks, or a share of them rounded up; 0.28 * 25 is 7.000000000000001."""
    return requested if isinstance(requested, int) else ceil(round(requested * blocks, 6))
