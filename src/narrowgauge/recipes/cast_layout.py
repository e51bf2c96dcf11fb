"""The keys of a cast that decide what its codes and scales represent: what a layout must be able to hold."""

from collections.abc import Mapping
from typing import Any

from narrowgauge.quantization import Cast
from narrowgauge.quantization.keys import Consumer
from narrowgauge.recipes.describe import key_value
from narrowgauge.system.toml_text import toml_value


def layout_of(cast: Cast) -> dict[str, Any]:
    """The keys of a cast that determine what its codes and scales represent."""
    return {key: cast.values()[key] for key in cast.unsupported(Consumer.SAME_LAYOUT)}


def beside(cast: Cast, layout: Mapping[str, Any]) -> list[str]:
    """The keys in which a cast's layout differs from another."""
    own = layout_of(cast)
    return [key for key in {**own, **layout} if own.get(key) != layout.get(key)]


def unlike(cast: Cast, other: Cast, known: tuple[str, ...] = ()) -> list[str]:
    """The keys in which the values of a forward pass under two casts may differ, except those in `known`."""
    mine, theirs = cast.values(), other.values()
    return [
        key
        for key, consumers in cast.consumers().items()
        if mine[key] != theirs[key] and key not in known and Consumer.SAME_FORWARD not in consumers
    ]


def written(cast: Cast, keys: list[str]) -> str:
    """Keys of a cast with their values, as a recipe writes them."""
    return ", ".join(f"{key} = {toml_value(key_value(key, cast.values()[key]))}" for key in keys)
