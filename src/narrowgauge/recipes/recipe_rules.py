"""What makes a recipe valid: the casts that a place can have, and what places need of each other.

A rule yields a sentence for what is wrong, with the way out; `require_place` and `require_recipe` raise the
first.

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
    GEMM_PLACES,
    KEEPING,
    MEETS,
    SEEN_BEFORE,
    STATE_PLACES,
    STREAM,
    Places,
    values_of,
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
#: Why state lacks a key; any other key gets the generic sentence.
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
    """A cast as it is, if a place can have it.

    Raises:
        UserError: It cannot.
    """
    of_place = {"saved": _of_saved, ATTENTION: _of_attention, STREAM: _of_stream}
    for problem in of_place.get(place.partition(".")[0], _of_operand)(place, cast):
        raise UserError(f"recipe place {place!r}: {problem}")
    return cast


def _of_operand(place: str, cast: Cast) -> Iterator[str]:
    if cast.center and place.endswith(".w"):
        yield f"center = {cast.center!r}, but a weight has no tokens; leave the key out"
    if cast.feedback:
        yield f"feedback = {cast.feedback!r}, but it belongs to weight; remove the key"
    if cast.is_for_state:
        yield (
            f"cast {cast.name!r} is for state ({', '.join(STATE_PLACES)}), not for "
            "a GEMM operand; use one of those that `narrowgauge recipes` shows, such as e4m3"
        )
    if unknown := cast.unsupported(Consumer.OPERAND):
        yield f"GEMM operands have no {', '.join(unknown)}; remove the key"


def _of_saved(_: str, cast: Cast) -> Iterator[str]:
    if unknown := cast.unsupported(Consumer.SAVED):
        belongs = f"{', '.join(unknown)} belongs to GEMM operands"
        yield f"{belongs}, and a layer keeps a tensor here; remove the key"


def _of_attention(_: str, cast: Cast) -> Iterator[str]:
    yield from _unknown(
        cast, Consumer.ATTENTION, "attention takes every scale from the tensor at hand, as it comes"
    )
    if cast.signs == "random":
        yield 'signs = "random", but transforms of attention have fixed signs; leave the key out'


def _of_stream(_: str, cast: Cast) -> Iterator[str]:
    return _unknown(cast, Consumer.STREAM, "the stream is read as it is by every layer after")


def _unknown(cast: Cast, consumer: Consumer, why: str) -> Iterator[str]:
    if cast.is_for_state:
        yield f"cast {cast.name!r} is for state, not for a GEMM operand; use one such as e4m3 or mxfp8"
    for key in cast.unsupported(consumer):
        yield f"{key} = {cast.values()[key]!r}, but {why}; leave the key out"


def require_recipe(recipe: Any) -> None:
    """Refuse a `Recipe` whose places do not fit together, under its casts or under those of a rule.

    Raises:
        UserError: They do not.
    """
    inputs = [c["fprop.x"] for c in (recipe.casts, *(r.casts for r in recipe.rules)) if "fprop.x" in c]
    for number, rule in enumerate((None, *recipe.rules)):
        of = Places(places={**recipe.places, **(rule.places if rule else {})})
        casts = of.casts
        for problem in chain(
            _of_products(casts),
            _of_reuse(casts, recipe.saved),
            _of_attention_products(of.attention),
            _of_channels(casts, inputs),
            _of_kept(recipe.saved, casts["fprop.x"]),
            _of_state(of.state),
        ):
            raise UserError(f"recipe {recipe.name!r}: {f'rule {number}: ' if number else ''}{problem}")
    operands = weight_operands(recipe.places, *(rule.places for rule in recipe.rules if rule.is_for_all))
    for problem in chain(
        _of_gather(recipe["gather"], operands, recipe["weight"]), _of_reduce(recipe["reduce"])
    ):
        raise UserError(f"recipe {recipe.name!r}: {problem}")


def _of_products(casts: Casts) -> Iterator[str]:
    """Operands that cannot be multiplied: both need the same transform, or none."""
    for a, b in zip(GEMM_PLACES[::2], GEMM_PLACES[1::2], strict=True):
        first, second = casts[a], casts[b]
        if (first.hadamard, first.signs) != (second.hadamard, second.signs):
            yield (
                f"hadamard = {first.hadamard} in {a} and {second.hadamard} in {b}, but the product stays "
                "the same only if both operands are transformed alike; give both places the same size and "
                "signs"
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
        elif cast.of and (unknown := casts[source].unsupported(Consumer.SOURCE)):
            yield (
                f"{place} = {source!r}, but {source} is transformed ({', '.join(unknown)}), so "
                f"its numbers are not the tensor's; name a cast in {place}, or transform neither"
            )
        elif cast.of and place == "wgrad.x" and not isinstance(saved, str):
            yield (
                f"wgrad.x = 'fprop.x' with saved = {saved.name!r}, but then the numbers of fprop.x "
                "are not kept; write saved = 'operand', or 'input'"
            )


def _of_kept(saved: str | Cast, x: Cast) -> Iterator[str]:
    """A kept operand `x` of fprop whose values differ from the input's."""
    if saved == "operand" and (unknown := x.unsupported(Consumer.KEPT)):
        yield (
            f"saved = 'operand', but fprop.x has {', '.join(unknown)}, so its codes are "
            "not all of the tensor; save 'input', or a cast"
        )


def _of_attention_products(attention: Mapping[str, Cast | None]) -> Iterator[str]:
    """A matmul of attention with only one operand transformed.

    In the backward pass, a matmul whose gradient is not narrow takes the other operand unquantized.
    """
    for product, (a, b) in ATTENTION_PRODUCTS.items():
        gradient = attention.get(a if a.endswith((".do", ".ds")) else b)
        is_backward = "do" in product or "ds" in product
        if is_backward and (gradient is None or not gradient.is_scaled):
            continue
        casts = attention.get(a), attention.get(b)
        first, second = ((0, ()) if cast is None else (cast.hadamard, cast.signs) for cast in casts)
        if first != second:
            yield (
                f"hadamard = {first[0]} in {a} and {second[0]} in {b}, but their product stays the "
                "same only if both are transformed alike; give both places the same size and signs"
            )


def _of_state(state: Mapping[str, Cast | None]) -> Iterator[str]:
    """Casts of operands only, weights without a dtype, a master of nothing."""
    weight, master = state["weight"], state["master"]
    assert weight is not None
    for place, cast in state.items():
        if cast is None:
            continue
        if cast.of:
            places = ", ".join(SEEN_BEFORE)
            yield f"{place} = {cast.of!r}, but only {places} take the numbers of another place; name a cast"
        for key in cast.unsupported(Consumer.STATE):
            why = _NOT_IN_STATE.get(key, "it belongs to GEMM operands")
            yield f"{key} in place {place!r}, but {why}; remove the key"
        if cast.has_row_scales:
            yield (
                f"tensor_scale = {cast.tensor_scale!r} in place {place!r}, but it belongs to "
                'GEMM operands; write "tensor" or "none"'
            )
        if cast.feedback and (place != "weight" or cast.name == "fp32" or master is not None):
            yield (
                f"feedback = {cast.feedback!r} in place {place!r}, but it is for narrow "
                "weights without a master, whose rounding error goes into the first moment; write "
                'master = "none", or remove the key'
            )
        if cast.prescale and place != "grad":
            yield f"prescale in place {place!r}, but it belongs to grad; remove the key"
    is_table = weight.expand or weight.codebook
    if not is_in_torch(weight.element) or is_table or weight.scale not in ("none", "fp32"):
        yield (
            f"weight = {weight.name!r}, but a weight needs a format that torch can hold and fp32 "
            "scales, such as bf16, fp16-scaled or e4m3"
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
    if weight.name != "fp32":
        if not keeps_stored(cast, weight):
            yield (
                f"gather = {cast.name!r}, but weights at rest in {weight.name!r} travel as they "
                'are; remove the key, or write gather = "fp32"'
            )
    elif not keeps_products(cast, operands):
        seen = ", ".join(dict.fromkeys(repr(c.name) for c in operands))
        yield (
            f"gather = {cast.name!r}, but weights can travel only in the cast that fprop.w and "
            f"dgrad.w both have at all times (here {seen}), with one scale a tensor or none, rounded to the "
            'nearest; write gather = "fp32"'
        )


def _of_reduce(cast: Cast) -> Iterator[str]:
    """Gradients that are added in a format that would need rescaling after an addition."""
    is_byte = cast.scale == "fp32" and cast.element.bits == 8
    if cast.unsupported(Consumer.REDUCE) or not (is_byte or cast.name in WIDE):
        yield (
            f"reduce = {cast.name!r}, but gradients are added up in {', '.join(WIDE)}, or in "
            "codes of a byte under one fp32 scale a tensor, such as e4m3, each sum rounded to the nearest"
        )


def have_same_numbers(casts: Mapping[str, Cast], a: str, b: str) -> bool:
    """Whether two places see the same values of the same tensor, whatever the axis."""
    return casts[a] == casts[b] and casts[a].ignores_axis and not casts[a].is_random


def reuses(place: str, casts: Mapping[str, Cast], saved: str | Cast) -> bool:
    """Whether dgrad.w or wgrad.x uses the values of the forward pass, or something made from them."""
    is_kept = place != "wgrad.x" or isinstance(saved, str)
    return is_kept and (bool(casts[place].of) or have_same_numbers(casts, SEEN_BEFORE[place], place))


def wide_backward(casts: Mapping[str, Cast], saved: str | Cast) -> dict[str, Cast]:
    """The casts of a backward pass that rounds nothing, but starts from the same values as these casts.

    An operand made from values of the forward pass is those values as they are; any other is the tensor in
    fp32.
    """
    wide = dict.fromkeys((p for p in GEMM_PLACES if not p.startswith("fprop.")), FP32)
    for place in ("dgrad.w", "wgrad.x"):
        if reuses(place, casts, saved) or (place == "wgrad.x" and saved == "operand"):
            wide[place] = values_of(SEEN_BEFORE[place])
    return wide


def weight_operands(*given: Mapping[str, Cast | None]) -> tuple[Cast, ...]:
    """The casts of a weight in GEMMs, of those that a recipe and its rules for all layers put into places.

    A GEMM that reuses another's values as they are has no separate cast.
    """
    found = (casts.get(place) for casts in given for place in ("fprop.w", "dgrad.w"))
    return tuple(cast for cast in found if cast is not None and (not cast.of or cast.is_scaled))


def fitting_gather(requested: Cast, operands: Sequence[Cast], weight: Cast) -> Cast:
    """The requested cast if it changes no GEMM, else one that changes none: the weight's, or fp32."""
    if weight.name != "fp32":
        stored = weight.having(rounding="nearest-even", feedback="")
        return next((c for c in (requested, stored) if keeps_stored(c, weight)), FP32)
    return requested if keeps_products(requested, operands) else FP32


def keeps_stored(cast: Cast, weight: Cast) -> bool:
    """Whether a quantized weight keeps its values in this cast."""
    is_same = cast == weight.having(rounding=cast.rounding, feedback=cast.feedback)
    return cast.name == "fp32" or (is_same and weight.block is None)


def keeps_products(cast: Cast, operands: Sequence[Cast]) -> bool:
    """Whether GEMMs see the same values of a weight sent in this cast as of one in fp32."""
    if cast.name == "fp32":
        return True
    is_one = cast.scale == "fp32" or not cast.is_scaled
    return is_one and not cast.unsupported(Consumer.GATHER) and all(c == cast for c in operands)
