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

from collections.abc import Callable, Mapping
from typing import Any

from narrowgauge.formats import Format, format_facts, format_from_facts, own_formats, register_format
from narrowgauge.quantization import Cast, cast_keys, cast_names, is_cast_table, make_cast
from narrowgauge.recipes.places import (
    CAST_TABLE,
    COMPUTE,
    GEMM_PLACES,
    GROUPS,
    IN_FP32,
    OFFLOADABLE,
    PLACES,
    SAVED,
    SEEN_BEFORE,
    STATE_PLACES,
    STREAM,
    WIRE_PLACES,
    Moment,
    Rule,
    values_of,
    wide_operands,
)
from narrowgauge.recipes.recipe_rules import require_place
from narrowgauge.system.errors import UserError, nearest, unknown
from narrowgauge.system.toml_text import toml_key, toml_value

_PLACES = (*GROUPS, "saved", STREAM, "offload", *STATE_PLACES, *WIRE_PLACES)
RECIPE_KEYS = ("name", "title", "source", "compute", "keep", "rule", "format", *_PLACES)
_LAYER_KEYS = ("modules", "first_blocks", "last_blocks")
_CLOCK_KEYS = tuple(f"{word}{unit}" for word in ("from", "until") for unit in ("_step", "_share", ""))
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
    words = {"name": name, "title": "", "source": ""}
    fields = {key: _value(table, key, default, _is_text, "text in quotes") for key, default in words.items()}
    compute = _value(table, "compute", "bf16", COMPUTE.__contains__, f"one of {', '.join(COMPUTE)}")
    fields |= recipe_fields(_places(table), {**dict.fromkeys(GEMM_PLACES, make_cast(compute)), **IN_FP32})
    rules = table.get("rule", [])
    if not isinstance(rules, list):
        raise UserError("rule must be a list of tables; write [[rule]] above each")
    for rule in rules:
        _check_keys(_table(rule, "rule"), _RULE_KEYS, "[[rule]] key")
    found = [_rule(rule) for rule in rules]
    keep = _table(table.get("keep", {}), "keep")
    _check_keys(keep, _LAYER_KEYS, "[keep] key")
    if any((layers := _layers(keep)).values()):
        found.append(Rule(places=wide_operands(compute), keeps_state=True, **layers))
    return {**fields, "compute": compute, "rules": tuple(found)}


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
        if place == "offload":
            names = names_from(place, value, 'places such as ["master", "m", "v"]')
            if wrong := [name for name in names if name not in OFFLOADABLE]:
                raise unknown("place to offload", wrong[0], OFFLOADABLE)
            fields[place] = tuple(p for p in OFFLOADABLE if p in names)
        elif place == "compute":
            if value not in COMPUTE:
                raise unknown("compute format", str(value), COMPUTE)
            fields[place] = value
        elif place == "saved":
            is_word = isinstance(value, str) and value in SAVED
            fields[place] = value if is_word else cast_in(place, value)
        elif place == "master" and value == "none":
            casts[place] = None
        elif place not in (*PLACES, *GROUPS):
            raise unknown("recipe place", place, (*PLACES, *GROUPS))
        else:  # the name of a group means all of its places
            casts |= {one: cast_in(one, value) for one in GROUPS.get(place, (place,))}
    return fields | {"places": casts}


def names_from(key: str, value: Any, examples: str) -> tuple[str, ...]:
    """The names in a list, or separated by commas; none for "none"."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise UserError(f"{key} = {value!r}, but it must be a list of {examples}")
    return tuple(n.strip() for n in names if n.strip() not in ("", "none"))


def cast_in(place: str, value: Any) -> Cast:
    """The cast that a recipe's text puts in a place that can have it."""
    if not isinstance(value, str | Mapping | Format | Cast):
        raise UserError(
            f'recipe place {place!r} = {value!r}, but it must be a cast such as "mxfp4", or a table such as '
            f"{CAST_TABLE}"
        )
    if isinstance(value, Mapping) and set(value) == {"of"} and value["of"] in GEMM_PLACES:
        value = value["of"]
    is_place = isinstance(value, str) and value in GEMM_PLACES
    try:
        return require_place(place, values_of(value) if is_place else make_cast(value))
    except UserError as error:
        why = str(error)
        words = {"saved": SAVED, "master": ("none",)} | {later: (of,) for later, of in SEEN_BEFORE.items()}
        if isinstance(value, str) and (
            near := nearest(value, (*words.get(place, ()), *cast_names()))
        ) in words.get(place, ()):
            why = f"unknown value {value!r}; the nearest is {near!r}"
        raise UserError(f"recipe place {place!r}: {why}") from None


def _rule(table: Mapping[str, Any]) -> Rule:
    """The rule that a table describes."""
    fields = recipe_fields(_places(table), {})
    start, until = _moment(table, "from"), _moment(table, "until")
    for first, last, begins, ends in zip(_CLOCK_KEYS[:3], _CLOCK_KEYS[3:], start, until, strict=True):
        if ends and begins >= ends:
            raise UserError(
                f"{last} = {table[last]!r} and {first} = {table[first]!r}, but then the rule never holds; "
                "let it end later"
            )
    return Rule(**fields, start=start, until=until, **_layers(table))


def _moment(table: Mapping[str, Any], word: str) -> Moment:
    """The start or the end of a rule, whose keys begin with `word`."""
    rule = f'"decay", the schedule\'s only clock; or write {word}_step or {word}_share'
    _value(table, word, "decay", ("decay",).__contains__, rule)
    step = _value(table, f"{word}_step", 0, _is_count, "a number of steps")
    share = _value(table, f"{word}_share", 0.0, _is_share, "a share from 0 to 1")
    return Moment(step, share, word in table)


def _layers(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a rule that select layers."""

    def is_end(value: Any) -> bool:
        return _is_count(value) or _is_share(value)

    def is_list(value: Any) -> bool:
        return isinstance(value, list) and all(map(_is_text, value))

    names = _value(table, "modules", [], is_list, 'a list of names such as ["head"]')
    rule = "a share from 0 to 1, or a number of blocks"
    ends = {key: _value(table, key, 0, is_end, rule) for key in ("first_blocks", "last_blocks")}
    return {"modules": tuple(names), **ends}


def _value(
    table: Mapping[str, Any], key: str, default: Any, is_valid: Callable[[Any], bool], rule: str
) -> Any:
    """The value of a key, if it is valid."""
    value = table.get(key, default)
    if not is_valid(value):
        raise UserError(f"{key} = {value!r}, but it must be {rule}")
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


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


def table_text(table: Mapping[str, Any]) -> str:
    """A recipe's table as TOML, a line for each key; with the registered formats that it names."""
    nested: dict[str, Any] = {}
    for key, value in table.items():
        outer, _, inner = str(key).partition(".")
        if inner and not isinstance(of_outer := nested.setdefault(outer, {}), dict):
            raise UserError(f"recipe: {key!r} and {outer} = {of_outer!r}; give {outer} one value or a table")
        (nested[outer] if inner else nested)[inner or outer] = _plain(value, key)
    text = toml_value(nested)
    if facts := {fmt.name: format_facts(fmt) for fmt in own_formats() if f'"{fmt.name}"' in text}:
        nested["format"] = {**facts, **nested.get("format", {})}
    return "".join(f"{toml_key(key)} = {toml_value(value)}\n" for key, value in nested.items())


def _plain(value: Any, key: str) -> Any:
    """A value of a dictionary as TOML has it."""
    if isinstance(value, Format):
        return value.name if value.bits > 8 else {"element": value.name}
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{key}.{k}") for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(one, key) for one in value]
    if not isinstance(value, str | int | float):
        raise UserError(
            f"recipe: {key} = {value!r}, but a value is text, a number, true or false, or a table"
        )
    return value
