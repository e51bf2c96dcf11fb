"""A recipe's TOML, from what was read from another tool's file."""

from collections.abc import Mapping
from typing import Any

from narrowgauge.quantization import Cast
from narrowgauge.recipes.describe import cast_keys
from narrowgauge.recipes.exchange.reading import Reading
from narrowgauge.recipes.places import GEMMS
from narrowgauge.toml_text import toml_value


def recipe_toml(reading: Reading, words: Mapping[str, str], compute: str) -> str:
    """The TOML of a recipe.

    Args:
        reading: What was read.
        words: The name, title and source of the recipe.
        compute: The format of everything that is not narrow.
    """
    lines = [f"# Lost: {sentence}." for sentence in reading.lost]
    lines += [f"{key} = {toml_value(value)}" for key, value in {**words, "compute": compute}.items()]
    lines += [f"gather = {toml_value(reading.gather)}"] if reading.gather else []
    keep = reading.keep
    kept = {"modules": list(keep.modules), "first_blocks": keep.first_blocks, "last_blocks": keep.last_blocks}
    if any(kept.values()):
        lines += ["", "[keep]", *(f"{key} = {toml_value(value)}" for key, value in kept.items() if value)]
    if reading.only:
        lines += ["", "[[rule]]", f"modules = {toml_value(list(reading.only))}"]
        lines += [f"{place} = {toml_value(cast_value(c))}" for place, c in reading.casts.items()]
    else:
        for gemm in GEMMS:
            of_gemm = {p: c for p, c in reading.casts.items() if p.startswith(f"{gemm}.")}
            lines += ["", f"[{gemm}]"] if of_gemm else []
            lines += [f"{p.partition('.')[2]} = {toml_value(cast_value(c))}" for p, c in of_gemm.items()]
    return "\n".join(lines) + "\n"


def cast_value(c: Cast) -> str | dict[str, Any]:
    """A cast as a recipe writes it: its name, or the table of its keys."""
    name, keys = cast_keys(c)
    if not keys:
        return name
    return ({"cast": name} if name else {}) | keys
