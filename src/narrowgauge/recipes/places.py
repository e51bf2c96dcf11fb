"""The places of a training step, and which casts each of them can have."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from narrowgauge.errors import UserError, nearest, unknown
from narrowgauge.formats import Format, is_in_torch
from narrowgauge.quantization import Cast, cast_names, make_cast
from narrowgauge.quantization.keys import Taker
from narrowgauge.recipes.attention_places import (
    ATTENTION,
    ATTENTION_PLACES,
    STREAM,
    attention_casts,
    stream_cast,
)

GEMMS = ("fprop", "dgrad", "wgrad")
GEMM_PLACES = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
# The place that quantized the same tensor before, whose values a place may reuse.
SEEN_BEFORE = {"dgrad.w": "fprop.w", "wgrad.x": "fprop.x", "wgrad.dy": "dgrad.dy"}
# The storage of state, by default: of the weights of linear layers, and the moments of every large tensor.
# "none" = no second, wider copy of a weight.
STATE_PLACES = ("weight", "master", "grad", "m", "v")
FP32 = make_cast("fp32")
WIDE_STATE: Mapping[str, Cast | None] = dict.fromkeys(STATE_PLACES, FP32) | {"master": None}
WIRE_PLACES = ("gather", "reduce")  # between devices: weights of linear layers, and their gradients
# For the tensor in each place of a linear layer: the dimension that remains in the GEMM's result, and the one
# that it contracts. M tokens, N outputs, K inputs.
DIMENSIONS = {
    "fprop.x": "MK",
    "saved": "MK",
    "fprop.w": "NK",
    "dgrad.dy": "MN",
    "dgrad.w": "KN",
    "wgrad.dy": "NM",
    "wgrad.x": "KM",
    **dict.fromkeys(STATE_PLACES, "NK"),
}
PLACES = (*GEMM_PLACES, *ATTENTION_PLACES, "saved", STREAM, *STATE_PLACES, *WIRE_PLACES)
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
#: Why state lacks a key; any other key gets the generic sentence.
_NOT_IN_STATE = {
    "center": "state has no tokens",
    "hadamard": "transforms belong to GEMM operands",
    "outliers": "clamping belongs to GEMM operands",
    "function": "a function gives values and no codes, which state stores",
    "history": "state takes its scales from the tensor at hand",
}


def recipe_fields(
    places: Mapping[str, Any],
    casts: Mapping[str, Cast],
    state: Mapping[str, Cast | None],
    attention: Mapping[str, Cast | None],
) -> dict[str, Any]:
    """The fields of a recipe after a text sets some `KEYS` over its casts and state."""
    casts, state, attention = dict(casts), dict(state), dict(attention)
    fields: dict[str, Any] = {}
    for place, value in places.items():
        if place == "saved":
            fields[place] = value if isinstance(value, str) and value in SAVED else cast_in(place, value)
            kept = fields[place]
            if isinstance(kept, Cast):
                require_kept(kept)
        elif place == "offload":
            fields[place] = offload_from(value)
        elif place == "compute":
            if value not in COMPUTE:
                raise unknown("compute format", str(value), COMPUTE)
            fields[place] = value
        elif place in STATE_PLACES:
            state[place] = None if place == "master" and value == "none" else cast_in(place, value)
        elif place in WIRE_PLACES:
            fields[place] = cast_in(place, value)
        elif place == STREAM:
            fields[place] = stream_cast(cast_in(place, value))
        elif place.partition(".")[0] == ATTENTION:
            attention |= attention_casts(place, cast_in(place, value))
        else:
            casts |= casts_from(place, value)
    return fields | {"casts": casts, "state": state, "attention": attention}


def casts_from(place: str, value: Any) -> dict[str, Cast]:
    """The casts that a recipe's text puts in a place; the name of a GEMM means both of its operands."""
    if place in GEMMS:
        return {p: c for operand in GROUPS[place] for p, c in casts_from(operand, value).items()}
    if place not in GEMM_PLACES:
        raise unknown("recipe place", place, (*PLACES, *GROUPS))
    cast = cast_in(place, value)
    require_operand(place, cast)
    return {place: cast}


def require_operand(place: str, cast: Cast) -> None:
    """Refuse a cast that a GEMM operand cannot have."""
    if cast.center and place.endswith(".w"):
        raise UserError(
            f"recipe place {place!r}: center = {cast.center!r}, but a weight has no tokens; leave the key out"
        )
    if cast.feedback:
        raise UserError(
            f"recipe place {place!r}: feedback = {cast.feedback!r}, but it belongs to weight; remove the key"
        )
    if cast.is_for_state:
        raise UserError(
            f"recipe place {place!r}: cast {cast.name!r} is for state ({', '.join(STATE_PLACES)}), not for "
            "a GEMM operand; use one of those that `narrowgauge recipes` shows, such as e4m3"
        )
    if unknown_keys := cast.unsupported(Taker.OPERAND):
        raise UserError(
            f"recipe place {place!r}: GEMM operands have no {', '.join(unknown_keys)}; remove the key"
        )


def require_kept(cast: Cast) -> None:
    """Refuse a cast in which a layer cannot keep its input."""
    if unknown_keys := cast.unsupported(Taker.SAVED):
        raise UserError(
            f"recipe place 'saved': {', '.join(unknown_keys)} belongs to GEMM operands, and a "
            "layer keeps a tensor here; remove the key"
        )


def offload_from(value: Any) -> tuple[str, ...]:
    """The places that a recipe's text keeps on the host: a list, or names separated by commas."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise UserError(f'offload = {value!r}, but it must be a list of places such as ["master", "m", "v"]')
    names = [n.strip() for n in names if n.strip() not in ("", "none")]
    for name in names:
        if name not in OFFLOADABLE:
            raise unknown("place to offload", name, OFFLOADABLE)
    return tuple(p for p in OFFLOADABLE if p in names)


def modules_from(value: Any) -> tuple[str, ...]:
    """The names of the modules that a recipe keeps wide: a list, or names separated by commas; or "none"."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise UserError(f'keep = {value!r}, but it must be a list of names such as ["head"], or "none"')
    return tuple(n.strip() for n in names if n.strip() not in ("", "none"))


def cast_in(place: str, value: Any) -> Cast:
    """The cast that a recipe's text puts in a place."""
    if not isinstance(value, str | Mapping | Format | Cast):
        raise UserError(
            f'recipe place {place!r} = {value!r}, but it must be a cast such as "mxfp4", or a table such as '
            f"{CAST_TABLE}"
        )
    try:
        if isinstance(value, str) and value in GEMM_PLACES:
            return replace(make_cast("bf16"), name=value, of=value)  # the values as they are: no format
        if isinstance(value, Mapping) and set(value) == {"of"} and value["of"] in GEMM_PLACES:
            return cast_in(place, value["of"])
        return make_cast(value)
    except UserError as error:
        why, near = str(error), None
        if isinstance(value, str):
            near = nearest(value, (*_words_of(place), *cast_names()))
        if near in _words_of(place):
            why = f"unknown value {value!r}; the nearest is {near!r}"
        raise UserError(f"recipe place {place!r}: {why}") from None


def _words_of(place: str) -> tuple[str, ...]:
    """The words that a place takes besides casts."""
    own = {"saved": SAVED, "master": ("none",)}
    return own.get(place, (SEEN_BEFORE[place],) if place in SEEN_BEFORE else ())


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
            wide[place] = cast_in(place, SEEN_BEFORE[place])
    return wide


def require_state(state: Mapping[str, Cast | None], where: str) -> None:
    """Refuse invalid state: casts of operands only, weights without a dtype, a master of nothing."""
    for place, cast in state.items():
        if cast is None:
            continue
        if cast.of:
            raise UserError(
                f"{where}: {place} = {cast.of!r}, but only {', '.join(SEEN_BEFORE)} take the numbers of "
                "another place; name a cast"
            )
        for key in cast.unsupported(Taker.STATE):
            why = _NOT_IN_STATE.get(key, "it belongs to GEMM operands")
            raise UserError(f"{where}: {key} in place {place!r}, but {why}; remove the key")
        if cast.has_row_scales:
            raise UserError(
                f"{where}: tensor_scale = {cast.tensor_scale!r} in place {place!r}, but it belongs to "
                'GEMM operands; write "tensor" or "none"'
            )
        if cast.feedback and (place != "weight" or cast.name == "fp32" or state["master"] is not None):
            raise UserError(
                f"{where}: feedback = {cast.feedback!r} in place {place!r}, but it is for narrow "
                "weights without a master, whose rounding error goes into the first moment; write "
                'master = "none", or remove the key'
            )
        if cast.prescale and place != "grad":
            raise UserError(f"{where}: prescale in place {place!r}, but it belongs to grad; remove the key")
    weight, master = state["weight"], state["master"]
    assert weight is not None
    is_table = weight.expand or weight.codebook
    if not is_in_torch(weight.element) or is_table or weight.scale not in ("none", "fp32"):
        raise UserError(
            f"{where}: weight = {weight.name!r}, but a weight needs a format that torch can hold and fp32 "
            "scales, such as bf16, fp16-scaled or e4m3"
        )
    if master is not None and weight.name == "fp32":
        raise UserError(
            f"{where}: master = {master.name!r} with weights in fp32, but a master is a wider copy of "
            'narrow weights; narrow the weight, or write master = "none"'
        )


def require_reuse(casts: Mapping[str, Cast], saved: str | Cast, where: str) -> None:
    """Refuse a place that reuses the values of another one, unless that one saw the same tensor before.

    Raises:
        UserError: It saw another tensor, later or never, or transformed; or these values are not kept.
    """
    for place, cast in casts.items():
        if not cast.of:
            continue
        source = SEEN_BEFORE.get(place)
        if source is None:
            raise UserError(
                f"{where}: {place} = {cast.of!r}, but no place sees its tensor before; name a cast"
            )
        if cast.of != source:
            raise UserError(
                f"{where}: {place} = {cast.of!r}, but that is another tensor, of another shape; the place "
                f"that sees this one before is {source!r}"
            )
        if unknown_keys := casts[source].unsupported(Taker.SOURCE):
            raise UserError(
                f"{where}: {place} = {source!r}, but {source} is transformed ({', '.join(unknown_keys)}), so "
                f"its numbers are not the tensor's; name a cast in {place}, or transform neither"
            )
        if place == "wgrad.x" and not isinstance(saved, str):
            raise UserError(
                f"{where}: wgrad.x = 'fprop.x' with saved = {saved.name!r}, but then the numbers of fprop.x "
                "are not kept; write saved = 'operand', or 'input'"
            )


def require_saved(saved: str | Cast, x: Cast, where: str) -> None:
    """Refuse to keep the operand `x` of fprop if its values differ from the input's."""
    if saved == "operand" and (unknown_keys := x.unsupported(Taker.KEPT)):
        raise UserError(
            f"{where}: saved = 'operand', but fprop.x has {', '.join(unknown_keys)}, so its codes are "
            "not all of the tensor; save 'input', or a cast"
        )


def require_products(casts: Mapping[str, Cast], where: str) -> None:
    """Refuse operands that cannot be multiplied: both need the same transform, or none."""
    for a, b in zip(GEMM_PLACES[::2], GEMM_PLACES[1::2], strict=True):
        first, second = casts[a], casts[b]
        if (first.hadamard, first.signs) != (second.hadamard, second.signs):
            raise UserError(
                f"{where}: hadamard = {first.hadamard} in {a} and {second.hadamard} in {b}, but the product "
                "stays the same only if both operands are transformed alike; give both places the same size "
                "and signs"
            )
