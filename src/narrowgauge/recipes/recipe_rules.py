"""What makes a recipe valid: the casts that a place can have, and what places need of each other.

`require_place` checks one cast as it is read, so that the error names the place of the file; `require_recipe`
checks every recipe that is made, also by code. A rule yields a sentence for what is wrong, with the way out;
the first is raised.

**gather** Devices that each hold a shard of a weight gather the shards before a GEMM. Sending them in low
precision must change nothing: the GEMM has to see, bit for bit, what it would see of the full wide weight. So
a weight is sent in the cast that fprop.w and dgrad.w both have, if that cast has no scale or one for the full
tensor (agreed on beforehand, from the amax of all shards) and rounds to nearest. A quantized weight is sent
as its stored bytes. Anything else is sent in fp32.

**reduce** Devices add their gradients. Narrow formats are rounded after every addition here, so this place
changes the trajectory of a run on several devices (MS-AMP uses FP8 with scales that all devices share).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from narrowgauge.formats import is_in_torch
from narrowgauge.quantization import Cast
from narrowgauge.quantization.keys import Consumer
from narrowgauge.recipes.places import (
    ATTENTION,
    CHOOSES,
    FP32,
    GEMMS,
    GRADIENT_PLACES,
    GROUPS,
    KEEPING,
    MEETS,
    SEEN_BEFORE,
    STATE_PLACES,
    STREAM,
    WIRE_PLACES,
    Places,
)
from narrowgauge.system.errors import UserError

#: The two operands of each matmul of attention: the forward pass first.
ATTENTION_PRODUCTS: Mapping[str, tuple[str, str]] = {
    "q kᵀ": ("attention.q", "attention.k"),
    "p v": ("attention.p", "attention.v"),
    "pᵀ do": ("attention.p", "attention.do"),
    "do vᵀ": ("attention.do", "attention.v"),
    "ds k": ("attention.ds", "attention.k"),
    "dsᵀ q": ("attention.ds", "attention.q"),
}
#: What reads the casts of a place, by the first part of its name, and why it lacks a key; any other place is
#: an operand of a GEMM.
_READERS = {
    "saved": (Consumer.SAVED, "it belongs to GEMM operands, and a layer keeps a tensor here"),
    ATTENTION: (Consumer.ATTENTION, "attention takes every scale from the tensor at hand, as it comes"),
    STREAM: (Consumer.STREAM, "the stream is read as it is by every layer after"),
    **dict.fromkeys(STATE_PLACES, (Consumer.STATE, "it belongs to GEMM operands")),
}
_OPERAND = (Consumer.OPERAND, "a GEMM operand cannot have it")
_NOT_IN_STATE = {
    "center": "state has no tokens",
    "hadamard": "transforms belong to GEMM operands",
    "outliers": "clamping belongs to GEMM operands",
    "function": "a function gives values and no codes, which state stores",
    "history": "state takes its scales from the tensor at hand",
}
Casts = Mapping[str, Cast]
WIDE = ("fp32", "bf16", "fp16")  # in which gradients are added up


def require_place(place: str, cast: Cast) -> Cast:
    """A cast as it is, if a place can have it; the caller names the place.

    Raises:
        UserError: It cannot.
    """
    for problem in _of_place(place, cast):
        raise UserError(problem)
    return cast


def _of_place(place: str, cast: Cast) -> Iterator[str]:
    """Casts and keys that a place lacks; `reduce` needs a format without rescaling after an addition."""
    if place in WIRE_PLACES:
        is_byte = cast.scale == "fp32" and cast.element.bits == 8
        if place == "reduce" and (cast.unsupported[Consumer.REDUCE] or not (is_byte or cast.name in WIDE)):
            yield (
                f"reduce = {cast.name!r}, but gradients are added up in {', '.join(WIDE)}, or in "
                "codes of a byte under one fp32 scale a tensor, such as e4m3, each sum rounded to the nearest"
            )
        return
    kind, why = _READERS.get(place.partition(".")[0], _OPERAND)
    is_state = kind == Consumer.STATE
    if cast.is_for_state and kind not in (Consumer.STATE, Consumer.SAVED):
        yield (
            f"cast {cast.name!r} is for state ({', '.join(STATE_PLACES)}), not for "
            "a GEMM operand; use one of those that `narrowgauge recipes` shows, such as e4m3"
        )
    if is_state and cast.of:
        places = ", ".join(SEEN_BEFORE)
        yield f"{place} = {cast.of!r}, but only {places} take the numbers of another place; name a cast"
    if cast.center and place.endswith(".w"):
        yield f"center = {cast.center!r}, but a weight has no tokens; leave the key out"
    if cast.feedback and place != "weight":
        yield f"feedback = {cast.feedback!r}, but it belongs to weight; remove the key"
    for key in cast.unsupported[kind]:
        said = _NOT_IN_STATE.get(key, why) if is_state else why
        yield f"{key} = {cast.values()[key]!r}, but {said}; leave the key out"
    if kind == Consumer.ATTENTION and cast.signs == "random":
        yield 'signs = "random", but transforms of attention have fixed signs; leave the key out'
    if is_state and cast.has_row_scales:
        yield (
            f'tensor_scale = {cast.tensor_scale!r}, but it belongs to GEMM operands; write "tensor" or "none"'
        )
    if cast.prescale and place != "grad":
        yield "prescale = true, but it belongs to grad; remove the key"
    is_table = cast.expand or cast.codebook or not is_in_torch(cast.element)
    if place == "weight" and (is_table or cast.scale not in ("none", "fp32")):
        yield (
            f"weight = {cast.name!r}, but a weight needs a format that torch can hold and fp32 "
            "scales, such as bf16, fp16-scaled or e4m3"
        )


def require_recipe(recipe: Any) -> None:
    """Refuse a `Recipe` whose places do not fit together, under its casts or under those of a rule.

    Raises:
        UserError: They do not.
    """
    inputs = [cast for _, cast in recipe.ever_in([CHOOSES])]
    for number, rule in enumerate((None, *recipe.rules)):
        of = Places(places={**recipe.places, **(rule.places if rule else {})})
        for problem in chain(
            _of_products(of.places),
            _of_reuse(of.casts, recipe.saved),
            _of_channels(of.casts, inputs),
            _of_stored(recipe.saved, of["fprop.x"], of["weight"], of.places["master"]),
            *(_of_place(place, cast) for place, cast in of.places.items() if cast is not None),
        ):
            raise UserError(f"recipe {recipe.name!r}: {f'rule {number}: ' if number else ''}{problem}")
    operands = weight_operands(recipe.places, *(rule.places for rule in recipe.rules if rule.is_for_all))
    for problem in _of_gather(recipe["gather"], operands, recipe["weight"]):
        raise UserError(f"recipe {recipe.name!r}: {problem}")


def _of_products(places: Mapping[str, Cast | None]) -> Iterator[str]:
    """Operands that cannot be multiplied: both need the same transform, or none.

    In the backward pass of attention, a matmul whose gradient is not narrow takes the other operand
    unquantized.
    """
    for pair in (*(GROUPS[gemm] for gemm in GEMMS), *ATTENTION_PRODUCTS.values()):
        casts = [places.get(place) for place in pair]
        if any(p in GRADIENT_PLACES and not (c and c.is_scaled) for p, c in zip(pair, casts, strict=True)):
            continue
        first, second = ((0, ()) if cast is None else (cast.hadamard, cast.signs) for cast in casts)
        if first != second:
            yield (
                f"hadamard = {first[0]} in {pair[0]} and {second[0]} in {pair[1]}, but the product stays the "
                "same only if both operands are transformed alike; give both places the same size and signs"
            )


def _of_reuse(casts: Casts, saved: str | Cast) -> Iterator[str]:
    """A place that reuses the values of another one, unless that one saw the same tensor before.

    It must not have seen another tensor, later or never, or transformed; and these values must be kept.
    """
    for place, cast in casts.items():
        source = SEEN_BEFORE.get(place, "")
        if cast.of and not source:
            yield f"{place} = {cast.of!r}, but no place sees its tensor before; name a cast"
        elif cast.of and cast.of != source:
            yield (
                f"{place} = {cast.of!r}, but that is another tensor, of another shape; the place "
                f"that sees this one before is {source!r}"
            )
        elif cast.of and (unknown := casts[source].unsupported[Consumer.SOURCE]):
            yield (
                f"{place} = {source!r}, but {source} is transformed ({', '.join(unknown)}), so "
                f"its numbers are not the tensor's; name a cast in {place}, or transform neither"
            )
        elif cast.of and place == "wgrad.x" and not isinstance(saved, str):
            yield (
                f"wgrad.x = 'fprop.x' with saved = {saved.name!r}, but then the numbers of fprop.x "
                "are not kept; write saved = 'operand', or 'input'"
            )


def _of_stored(saved: str | Cast, x: Cast, weight: Cast, master: Cast | None) -> Iterator[str]:
    """A kept operand `x` of fprop whose values differ from the input's; a weight and a master that do not go
    together.
    """
    if saved == "operand" and (unknown := x.unsupported[Consumer.KEPT]):
        yield (
            f"saved = 'operand', but fprop.x has {', '.join(unknown)}, so its codes are "
            "not all of the tensor; save 'input', or a cast"
        )
    if weight.feedback and (weight.name == "fp32" or master is not None):
        yield (
            f"feedback = {weight.feedback!r} in weight, but it is for narrow weights without a master, whose "
            'rounding error goes into the first moment; write master = "none", or remove the key'
        )
    if master is not None and weight.name == "fp32":
        yield (
            f"master = {master.name!r} with weights in fp32, but a master is a wider copy of "
            'narrow weights; narrow the weight, or write master = "none"'
        )


def _of_channels(casts: Casts, inputs: Sequence[Cast]) -> Iterator[str]:
    """Kept channels that are never chosen, are empty, or meet no operand in their cast.

    The channels are columns of a layer's input, and chosen from it. Its weight has the same columns, and so
    has the weight's gradient: there the columns of kept channels are the matmul of two operands in
    `keep_cast`. `inputs` is every cast that fprop.x has at any time.
    """
    shares = {(c.keep_channels, c.keep_steps, c.keep_every) for c in inputs if c.keep_channels}
    if len(shares) > 1:
        yield (
            "fprop.x keeps other channels from some time on, but a layer chooses them in one way; "
            "give all its casts the same keep_channels, keep_steps and keep_every"
        )
    for place, cast in casts.items():
        yield from _of_keeping(place, cast) if cast.keep_cast else ()
        if not cast.keep_channels or place == CHOOSES:
            continue
        if cast.keep_channels not in {share for share, *_ in shares}:
            yield (
                f"{place} has keep_channels = {cast.keep_channels:g}, but a layer's channels are "
                f"the channels of its input; give {CHOOSES} the same keep_channels"
            )
        if cast.keep_steps != 1 or cast.keep_every:
            yield (
                f"keep_steps or keep_every in {place}, but a layer's channels are chosen from its "
                f"input; say it in {CHOOSES}"
            )
    x, dy = casts["wgrad.x"], casts[MEETS]
    is_alone = x.keep_channels and x.hadamard and not dy.keep_cast
    if (dy.keep_cast and not x.keep_channels) or is_alone:
        yield (
            "only one operand of wgrad has a cast for kept channels, which are not transformed; "
            f"write keep_channels and keep_cast in wgrad.x, and keep_cast in {MEETS}"
        )


def _of_keeping(place: str, cast: Cast) -> Iterator[str]:
    """A cast for kept channels in a place that keeps none."""
    said = f"keep_cast = {cast.keep_cast!r} in {place}"
    if place not in (*KEEPING, MEETS):
        yield (
            f"{said}, but kept channels are columns of a "
            f"layer's input, which {', '.join(KEEPING)} have and {MEETS} meets; remove the key"
        )
    if place == MEETS and cast.keep_channels:
        yield (
            f"keep_channels = {cast.keep_channels:g} in {place}, but it only meets the channels of "
            "wgrad.x; write keep_cast alone"
        )
    if place != MEETS and not cast.keep_channels:
        yield f"{said}, but it keeps no channels; add keep_channels, such as 0.1"
    if place.startswith("fprop") and cast.hadamard:
        yield (
            f"keep_channels and hadamard = {cast.hadamard} in {place}, but a transform along "
            "the channels mixes them; leave out one of the two"
        )


def _of_gather(cast: Cast, operands: Sequence[Cast], weight: Cast) -> Iterator[str]:
    """Weights that are gathered in values that the GEMMs would not use.

    `operands` are the casts of fprop.w and dgrad.w at any time, `weight` is the cast of the stored weight.
    """
    if fitting_gather(cast, operands, weight) == cast:
        return
    if weight.name != "fp32":
        yield (
            f"gather = {cast.name!r}, but weights at rest in {weight.name!r} travel as they "
            'are; remove the key, or write gather = "fp32"'
        )
    seen = ", ".join(dict.fromkeys(repr(c.name) for c in operands))
    yield (
        f"gather = {cast.name!r}, but weights can travel only in the cast that fprop.w and "
        f"dgrad.w both have at all times (here {seen}), with one scale a tensor or none, rounded to the "
        'nearest; write gather = "fp32"'
    )


def have_equal_values(casts: Mapping[str, Cast], a: str, b: str) -> bool:
    """Whether two places see the same values of the same tensor, whatever the axis."""
    return casts[a] == casts[b] and casts[a].ignores_axis and not casts[a].is_random


def reuses(place: str, casts: Mapping[str, Cast], saved: str | Cast) -> bool:
    """Whether dgrad.w or wgrad.x uses the values of the forward pass, or something made from them."""
    is_kept = place != "wgrad.x" or isinstance(saved, str)
    return is_kept and (bool(casts[place].of) or have_equal_values(casts, SEEN_BEFORE[place], place))


def weight_operands(*given: Mapping[str, Cast | None]) -> tuple[Cast, ...]:
    """The casts of a weight in GEMMs, of those that a recipe and its rules for all layers put into places.

    A GEMM that reuses another's values as they are has no separate cast.
    """
    found = (casts.get(place) for casts in given for place in ("fprop.w", "dgrad.w"))
    return tuple(cast for cast in found if cast is not None and (not cast.of or cast.is_scaled))


def fitting_gather(requested: Cast, operands: Sequence[Cast], weight: Cast) -> Cast:
    """The requested cast if it changes no GEMM, else one that changes none: the weight's, or fp32.

    A quantized weight keeps its values in its own cast; GEMMs see the same values of a wide one if it is sent
    in the cast that they all have.
    """
    if requested.name == "fp32":
        return requested
    if weight.name == "fp32":
        is_one = requested.scale == "fp32" or not requested.is_scaled
        keeps = is_one and not requested.unsupported[Consumer.GATHER]
        return requested if keeps and all(c == requested for c in operands) else FP32
    if weight.block is not None:
        return FP32
    is_own = requested == weight.having(rounding=requested.rounding, feedback=requested.feedback)
    return requested if is_own else weight.having(rounding="nearest-even", feedback="")
