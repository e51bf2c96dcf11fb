"""Writes an assignment of formats to GEMMs as a readable recipe.

Layers with the same format in one GEMM share a rule. A rule selects them by their last component ("down") if
it fits exactly those layers, and by their full names otherwise.
"""

from collections.abc import Sequence

from narrowgauge.recipes import GEMMS
from narrowgauge.system.toml_text import toml_value
from narrowgauge.trainer.analysis.search import Assignment

_COMPUTE = "bf16"


def recipe_text(assignment: Assignment, name: str, title: str, source: str) -> str:
    """The TOML of a recipe with these GEMMs; those in bf16 need no rule."""
    layers = list(dict.fromkeys(layer for layer, _ in assignment))
    head = {"name": name, "title": title, "source": source, "compute": _COMPUTE}
    lines = [f"{key} = {toml_value(value)}" for key, value in head.items()]
    rules: dict[tuple[str, ...], dict[str, str]] = {}
    for gemm in GEMMS:
        for cast in dict.fromkeys(assignment.values()):
            chosen = [layer for layer in layers if assignment[layer, gemm] == cast]
            if chosen and cast != _COMPUTE:
                rules.setdefault(tuple(_patterns(chosen, layers)), {})[gemm] = cast
    for patterns, gemms in rules.items():
        is_all = len(patterns) == len({layer.rpartition(".")[2] for layer in layers}) and not any(
            "." in pattern for pattern in patterns
        )
        lines += ["", "[[rule]]"]
        lines += [] if is_all else [f"modules = {toml_value(list(patterns))}"]
        lines += [f"{gemm} = {toml_value(cast)}" for gemm, cast in gemms.items()]
    return "\n".join(lines) + "\n"


def _patterns(chosen: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The shortest patterns that match exactly the chosen layers."""
    patterns = []
    for layer in chosen:
        last = layer.rpartition(".")[2]
        alike = [other for other in layers if other.rpartition(".")[2] == last]
        patterns.append(last if set(alike) <= set(chosen) else layer)
    return list(dict.fromkeys(patterns))
