"""The names by which a key of the configuration is found, and the errors for a name that finds none.

An option of the command line is found by (in this order)

    its name                    --optimizer.lr, and --model, --steps ...
    the same, with hyphens      --optimizer-lr, --training.batch-size
    the last part of a key      --lr, --batch-size, --fprop.x
    its alias in the schema     --learning-rate, --seq-len, --max-grad-norm

Files accept only the names of the keys, and their errors suggest the key for another name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.quantization import cast_keys
from narrowgauge.recipes import CAST_TABLE, RECIPE_KEYS
from narrowgauge.system.errors import UserError, nearest, unknown

# Names of the most common keys, which stand for no other key that ends so.
SHORT = {
    "model": "model.name",
    "data": "data.source",
    "recipe": "recipe.name",
    "backend": "recipe.backend",
    "steps": "training.steps",
    "seed": "training.seed",
    "device": "training.device",
    "memory-limit": "training.memory_limit",
}


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Attributes:
        description: What it means.
        default: Its default as text; "" if it is empty or comes from the named model.
        metavar: The form of its value: N, X, true|false, or the allowed words.
        alias: The name that other trainers give it; "" if it has none.
    """

    description: str
    default: str
    metavar: str
    alias: str = ""

    def __str__(self) -> str:
        return f"{self.description} ({self.default})" if self.default else self.description


def plain(name: str) -> str:
    """A name with hyphens between its words, however it was written.

    >>> plain("batch_size"), plain("Optimizer.lr")
    ('batch-size', 'optimizer-lr')
    """
    return name.lower().replace("_", "-").replace(".", "-")


def other_names(keys: Mapping[str, Key]) -> dict[str, list[str]]:
    """The keys that each other name may stand for: the whole key, every ending of it, and its alias.

    >>> every = Key("steps between them", "10", "N")
    >>> names = other_names({"optimizer.lr": Key("", "", "X", "learning-rate"), "log.every": every})
    >>> names["lr"], names["learning-rate"], names["every"]
    (['optimizer.lr'], ['optimizer.lr'], ['log.every'])
    """
    aliases = {key.alias: [name] for name, key in keys.items() if key.alias}
    endings: dict[str, list[str]] = {}
    for name in keys:
        parts = name.split(".")
        for start in range(1, len(parts)):
            endings.setdefault(plain(".".join(parts[start:])), []).append(name)
    return aliases | endings | {plain(name): [name] for name in keys}


def key_of(name: str, keys: Mapping[str, Key]) -> str | None:
    """The key for a name without its `--`; None if it is unknown here.

    Raises:
        UserError: The name is ambiguous, or is a key of a cast.
    """
    found = other_names(keys).get(plain(name), [])
    if len(found) > 1:
        raise UserError(f"--{name} may mean {_or(found, '--')}; write the one that is meant")
    if found:
        return found[0]
    if answer := _of_a_cast(name):
        raise UserError(f"there is no option --{name}; {answer}")
    return None


def _of_a_cast(name: str) -> str:
    """The place to write a key of a cast in; "" for another name."""
    is_known = plain(name) in map(plain, cast_keys())
    where = f"it is a key of a cast; write it in a place, as in --recipe.fprop.x '{CAST_TABLE}'"
    return where if is_known else ""


def unknown_key(name: str, known: Mapping[str, Key], dashes: str = "") -> UserError:
    """The error for an unknown `section.key`.

    It names the key with this last part in another section or under another name, else the nearest key.

    >>> str(unknown_key("training.learning_rate", {"optimizer.lr": Key("", "", "X", "learning-rate")}))
    "unknown key 'training.learning_rate'; it is optimizer.lr"
    """
    kind = "option" if dashes else "key"
    section, _, last = name.rpartition(".")
    is_place = "." in section  # a place of a recipe: another place may have an operand with this name
    if section == "recipe" and last in RECIPE_KEYS:
        return UserError(
            f"unknown {kind} '{dashes}{name}'; it is a key of a recipe file: 'narrowgauge recipes fp8' "
            "prints one to start from, and --recipe FILE.toml takes it"
        )
    others = other_names(known)
    if not is_place and (found := others.get(plain(last), [])):
        return UserError(f"unknown {kind} '{dashes}{name}'; it is {_or(found, dashes)}")
    if answer := _of_a_cast(last):
        return UserError(f"unknown {kind} '{dashes}{name}'; {answer}")
    if not section and (near := nearest(plain(name), others)):
        keys = " or ".join(f"'{dashes}{key}'" for key in others[near])
        return UserError(f"unknown {kind} '{dashes}{name}'; the nearest is {keys}")
    return unknown(kind, dashes + name, [dashes + key for key in known])


def outside(name: str, value: object, keys: Mapping[str, Key]) -> UserError:
    """The error for a key in a file before any section.

    >>> str(outside("learning_rate", 0.1, {"optimizer.lr": Key("", "", "X", "learning-rate")}))
    'learning_rate = 0.1 stands outside a section; write lr below [optimizer]'
    """
    if answer := _of_a_cast(name):
        return UserError(f"unknown key {name!r} outside a section; {answer}")
    others, start = other_names(keys), f"{name} = {value!r} stands outside a section"
    near = plain(name) if plain(name) in others else nearest(plain(name), others)
    if near is None:
        return UserError(
            f"unknown key {name!r} outside a section; 'narrowgauge train --help all' lists the keys"
        )
    if near != plain(name):
        start = f"unknown key {name!r} outside a section; the nearest is {near!r}"
    places = (f"{key} below [{section}]" for section, _, key in (key.partition(".") for key in others[near]))
    return UserError(f"{start}; write {' or '.join(places)}")


def _or(keys: list[str], dashes: str) -> str:
    *first, last = (dashes + key for key in keys)
    return f"{', '.join(first)} or {last}" if first else last
