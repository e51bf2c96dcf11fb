"""The keys of a cast that decide what its codes and scales represent: what a layout must be able to hold."""

from collections.abc import Mapping
from typing import Any

from narrowgauge.quantization import Cast
from narrowgauge.recipes.describe import key_value
from narrowgauge.toml_text import toml_value

#: Keys of a cast that determine which codes and scales are stored, but not the values they represent.
CHOOSES_CODES = (
    *("scale_rule", "scale_target", "scale_rounding", "zero_scale", "headroom", "power_of_two", "correct"),
    *("rounding", "random_bits", "candidates", "choose", "history", "history_algorithm", "margin", "refresh"),
    *("outliers", "estimator_k", "estimator_cap"),  # outliers change the codes; a slope is for backward
)
#: Keys that have no effect on the values of a forward pass.
_ONLY_BACKWARD = ("estimator_k", "estimator_cap")


def layout_of(cast: Cast) -> dict[str, Any]:
    """The keys of a cast that determine what its codes and scales represent."""
    return {key: cast.values()[key] for key in cast.beyond(CHOOSES_CODES)}


def beside(cast: Cast, layout: Mapping[str, Any]) -> list[str]:
    """The keys in which a cast's layout differs from another."""
    own = layout_of(cast)
    return [key for key in {**own, **layout} if own.get(key) != layout.get(key)]


def unlike(cast: Cast, other: Cast, known: tuple[str, ...] = ()) -> list[str]:
    """The keys in which the values of a forward pass under two casts may differ, except those in `known`."""
    mine, theirs = cast.values(), other.values()
    return [key for key in mine if mine[key] != theirs[key] and key not in (*known, *_ONLY_BACKWARD)]


def written(cast: Cast, keys: list[str]) -> str:
    """Keys of a cast with their values, as a recipe writes them."""
    return ", ".join(f"{key} = {toml_value(key_value(key, cast.values()[key]))}" for key in keys)
