"""Parses a recipe: a table in, the fields of a `Recipe` out, and one sentence for every mistake.

name, title, source     text
compute = "bf16"        the format of everything that is not narrow ("bf16", "fp16", "fp32")
saved = "operand"       what is kept for the backward pass ("input", "operand", or a cast)

weight, grad, m, v      the storage of state, and a wider master of the weight; moments of every large
master = "none"         tensor, the rest of linear layers
gather = "e4m3"         weights on the wire: values that their GEMMs see anyway (fp32); and their
reduce = "bf16"         gradients, rounded after every addition (fp32)
stream = "bf16"         the residual stream (fp32)
offload = ["m", "v"]    which of master, grad, m, v are in host memory while a GPU computes

[keep]                  layers that stay in `compute`, their weights and gradients in fp32
modules = ["head"]      by name or pattern
first_blocks = 2        and blocks from the beginning or the end: a number,
last_blocks = 0.15      or with a decimal point a share, rounded up

[fprop]                 the casts of a GEMM's operands; also [dgrad] dy, w and [wgrad] dy, x
x = "mxfp4"
w = {cast = "mxfp4", scale_rule = "even"}

[dgrad]
w = "fprop.w"           the values of the same tensor in another GEMM, as they are; rounded again:
                        w = {cast = "mxfp4", of = "fprop.w"}

[attention]             the operands of attention: q, k, v, p, and the gradients do, ds
q = "e4m3"              (`places.py`); attention = "e4m3" is all six

[[rule]]                other casts, in some layers or from some time on; later rules win
modules = ["*.down"]    selected as in [keep]; without a selection, every layer
from_share = 0.9        after this share of the run's steps, or from_step = 5000, or from = "decay": once the
until_share = 0.95      learning rate falls; the rule ends with until_step, until_share, until = "decay"
fprop = "bf16"          both operands of a GEMM,
wgrad.dy = "mxfp8"      or one
v = "fp32"              or state: m and v of any parameter, weight, master and grad of a linear layer

[format.e3m4]           a custom format, which the casts above may then name (`formats.format`)
exponent_bits = 3       with mantissa_bits and bias; specials = "ieee", "nan-only", "negative-zero" or "none"
"""

from collections.abc import Mapping
from typing import Any

from narrowgauge.formats import Format, format_from_facts, register_format
from narrowgauge.quantization import Cast, cast_keys, cast_names, is_cast_table, make_cast
from narrowgauge.recipes.places import (
    ATTENTION,
    ATTENTION_PLACES,
    CAST_TABLE,
    COMPUTE,
    GEMM_PLACES,
    GEMMS,
    GROUPS,
    IN_FP32,
    OFFLOADABLE,
    PLACES,
    SAVED,
    SEEN_BEFORE,
    STATE_PLACES,
    STREAM,
    WIRE_PLACES,
    values_of,
    wide_operands,
)
from narrowgauge.recipes.recipe_rules import require_place
from narrowgauge.recipes.rule import Rule
from narrowgauge.system.errors import UserError, nearest, unknown

_PLACES = (*GROUPS, "saved", STREAM, "offload", *STATE_PLACES, *WIRE_PLACES)
RECIPE_KEYS = ("name", "title", "source", "compute", "keep", "rule", "format", *_PLACES)
_LAYER_KEYS = ("modules", "first_blocks", "last_blocks")
_CLOCK_KEYS = ("from_step", "from_share", "from", "until_step", "until_share", "until")
_RULE_KEYS = (*_LAYER_KEYS, *_CLOCK_KEYS, *GROUPS, *STATE_PLACES)


def fields_of(table: Mapping[str, Any], where: str, name: str) -> dict[str, Any]:
    """The fields of the recipe that a table describes.

    Args:
        table: The table of a recipe's file.
        where: The name of the file, for a command line that an error suggests.
        name: The recipe's name if the table has none.

    Raises:
        UserError: A key or cast is unknown, or a value has the wrong type; the caller names the file.
    """
    if not table:
        raise UserError("it is empty; 'narrowgauge recipes fp8' prints one to start from")
    _check_root(table, where)
    for of_format, facts in _table(table.get("format", {}), "format").items():
        register_format(format_from_facts(of_format, _table(facts, f"format.{of_format}")))
    compute = table.get("compute", "bf16")
    if compute not in COMPUTE:
        raise UserError(f"compute = {compute!r}, but it must be one of {', '.join(COMPUTE)}")
    wide = wide_operands(compute)
    return {
        "name": _text(table, "name", name),
        "title": _text(table, "title", ""),
        "source": _text(table, "source", ""),
        "compute": compute,
        **recipe_fields(_places(table), {**dict.fromkeys(GEMM_PLACES, make_cast(compute)), **IN_FP32}),
        "rules": (*_rules(table), *_kept(table, wide)),
    }


def _places(table: Mapping[str, Any]) -> dict[str, Any]:
    """The places that a table sets, by their full names."""
    found: dict[str, Any] = {}
    for key in _PLACES:
        if (value := table.get(key)) is None:
            continue
        if key not in GROUPS or isinstance(value, str) or is_cast_table(value):
            found[key] = value
        else:
            found |= {f"{key}.{operand}": cast for operand, cast in _table(value, key).items()}
    return found


def recipe_fields(places: Mapping[str, Any], over: Mapping[str, Cast | None]) -> dict[str, Any]:
    """The fields of a recipe, or of a rule, after a text sets some `KEYS` over the casts of its places."""
    casts = dict(over)
    fields: dict[str, Any] = {}
    for place, value in places.items():
        if place == "saved":
            is_word = isinstance(value, str) and value in SAVED
            fields[place] = value if is_word else require_place(place, cast_in(place, value))
        elif place == "offload":
            fields[place] = offload_from(value)
        elif place == "compute":
            if value not in COMPUTE:
                raise unknown("compute format", str(value), COMPUTE)
            fields[place] = value
        elif place in (*STATE_PLACES, *WIRE_PLACES):
            casts[place] = None if place == "master" and value == "none" else cast_in(place, value)
        elif place == STREAM:
            casts[place] = require_place(place, cast_in(place, value))
        else:
            casts |= casts_from(place, value)
    return fields | {"places": casts}


def casts_from(place: str, value: Any) -> dict[str, Cast]:
    """The casts that a recipe's text puts in a place; the name of a group means all of its places."""
    if place in GEMMS:
        return {p: c for operand in GROUPS[place] for p, c in casts_from(operand, value).items()}
    of_attention = (ATTENTION, *ATTENTION_PLACES)
    is_of_attention = place.partition(".")[0] == ATTENTION
    if place not in (of_attention if is_of_attention else GEMM_PLACES):
        raise unknown("recipe place", place, of_attention if is_of_attention else (*PLACES, *GROUPS))
    cast = require_place(place, cast_in(place, value))
    return dict.fromkeys(GROUPS.get(place, (place,)), cast)


def offload_from(value: Any) -> tuple[str, ...]:
    """The places that a recipe's text keeps on the host: a list, or names separated by commas."""
    names = _names(
        value, f'offload = {value!r}, but it must be a list of places such as ["master", "m", "v"]'
    )
    for name in names:
        if name not in OFFLOADABLE:
            raise unknown("place to offload", name, OFFLOADABLE)
    return tuple(p for p in OFFLOADABLE if p in names)


def modules_from(value: Any) -> tuple[str, ...]:
    """The names of the modules that a recipe keeps wide: a list, or names separated by commas; or "none"."""
    return _names(value, f'keep = {value!r}, but it must be a list of names such as ["head"], or "none"')


def _names(value: Any, refusal: str) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise UserError(refusal)
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
            return values_of(value)
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


def _kept(table: Mapping[str, Any], wide: Mapping[str, Cast | None]) -> list[Rule]:
    """The rule that [keep] stands for, if it selects any layers."""
    keep = _table(table.get("keep", {}), "keep")
    _check_keys(keep, _LAYER_KEYS, "[keep] key")
    layers = _layers(keep)
    return [Rule(places=wide, keeps_state=True, **layers)] if any(layers.values()) else []


def _rules(table: Mapping[str, Any]) -> list[Rule]:
    tables = table.get("rule", [])
    if not isinstance(tables, list):
        raise UserError("rule must be a list of tables; write [[rule]] above each")
    rules = []
    for rule in tables:
        _check_keys(_table(rule, "rule"), _RULE_KEYS, "[[rule]] key")
        rules.append(Rule(**recipe_fields(_places(rule), {}), **_clock(rule), **_layers(rule)))
    return rules


def _clock(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a rule that determine when it holds."""
    fields: dict[str, Any] = {}
    for word in ("from", "until"):
        step = table.get(f"{word}_step", 0)
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UserError(f"{word}_step = {step!r}, but it must be a number of steps")
        if table.get(word, "decay") != "decay":
            raise UserError(
                f'{word} = {table[word]!r}, but the schedule\'s only clock is "decay"; write '
                f"that, or {word}_step or {word}_share"
            )
        share = _share(table.get(f"{word}_share", 0.0), f"{word}_share")
        fields |= {f"{word}_step": step, f"{word}_share": share, f"{word}_decay": word in table}
    for key in ("step", "share", "decay"):
        first, last = fields[f"from_{key}"], fields[f"until_{key}"]
        if last and first >= last:
            words = f"until = 'decay' and from = {table.get('from')!r}"
            words = words if key == "decay" else f"until_{key} = {last!r} and from_{key} = {first!r}"
            raise UserError(f"{words}, but then the rule never holds; let it end later")
    return fields


def _layers(table: Mapping[str, Any]) -> dict[str, Any]:
    names = table.get("modules", [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise UserError(f'modules = {names!r}, but it must be a list of names such as ["head"]')
    blocks = {}
    for key in ("first_blocks", "last_blocks"):
        value = table.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int):
            value = _share(value, key)
        if value < 0:
            raise UserError(f"{key} = {value!r}, but it must be a share or a number of blocks")
        blocks[key] = value
    return {"modules": tuple(names), **blocks}


def _share(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{key} = {value!r}, but it must be a share from 0 to 1")
    return float(value)


def _check_root(table: Mapping[str, Any], where: str) -> None:
    """Refuse unknown keys of the file, including keys of a cast and sections of a configuration."""
    for key, value in table.items():
        if key not in RECIPE_KEYS and key in cast_keys():
            raise UserError(
                f"unknown key {key!r}: it is a key of a cast; write it in a place, as in "
                f"fprop.x = {CAST_TABLE}"
            )
        if key not in RECIPE_KEYS and isinstance(value, Mapping):
            raise UserError(
                f"unknown key {key!r} (known: {', '.join(RECIPE_KEYS)}); if the file is a "
                f"configuration, which has sections, name it without --recipe: narrowgauge train {where}"
            )
    _check_keys(table, RECIPE_KEYS, "key")


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], thing: str) -> None:
    for key in table:
        if key not in known:
            raise unknown(thing, key, known)


def _table(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{key} = {value!r}, but it must be a table; write [{key}] above its keys")
    return value


def _text(table: Mapping[str, Any], key: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise UserError(f"{key} = {value!r}, but it must be text in quotes")
    return value
