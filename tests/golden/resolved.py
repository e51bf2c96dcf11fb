"""Each recipe that ships, resolved: which cast every place of every layer of a model has.

One file a recipe, with two models in it. Layers that are alike stand together, so that a change of a recipe
is a change of few lines.
"""

from pathlib import Path

import torch

import narrowgauge as ng
from narrowgauge.nn import Linear
from narrowgauge.recipes import recipe, recipe_names
from narrowgauge.recipes.describe import recipe_facts
from narrowgauge.trainer.models import Transformer, model_config

FOLDER = Path(__file__).parent / "resolved"
MODELS = ("gpt2-124m", "llama3-3b")


def layers_of(model_name: str, recipe_name: str) -> dict[str, dict[str, str]]:
    """layer -> place -> cast, after conversion of a model whose weights are on no device."""
    with torch.device("meta"):
        model = Transformer(model_config(model_name))
    ng.convert(model, recipe(recipe_name), backend="emulated")
    found = {name: recipe_facts(m.recipe) for name, m in model.named_modules() if isinstance(m, Linear)}
    assert found
    return found


def text_of(recipe_name: str) -> str:
    """The file of a recipe."""
    parts = []
    for model in MODELS:
        groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for layer, facts in layers_of(model, recipe_name).items():
            groups.setdefault(tuple(facts.items()), []).append(layer)
        parts.append(f"[{model}]")
        for facts_of_group, layers in groups.items():
            parts.append("\n".join(names(layers)))
            alike: dict[str, list[str]] = {}
            for place, cast in facts_of_group:
                alike.setdefault(cast, []).append(place)
            parts += [f"    {', '.join(places)} = {cast}" for cast, places in alike.items()]
    return "\n".join(parts) + "\n"


def names(layers: list[str]) -> list[str]:
    """The names of layers, blocks with the same ones together: "blocks.0-9: qkv, o"."""
    blocks: dict[str, list[int]] = {}
    inside: dict[int, list[str]] = {}
    found = []
    for layer in layers:
        rest = layer.partition(".")[2]
        number, _, name = rest.partition(".")
        if number.isdecimal():
            inside.setdefault(int(number), []).append(name)
        else:
            found.append(layer)
    for number, held in inside.items():
        blocks.setdefault(", ".join(held), []).append(number)
    assert all(numbers == list(range(numbers[0], numbers[-1] + 1)) for numbers in blocks.values())
    ranges = [(f"{n[0]}-{n[-1]}" if len(n) > 1 else str(n[0]), held) for held, n in blocks.items()]
    return [f"blocks {r}: {held}" for r, held in ranges] + found


def write() -> None:
    """Keeps the file of every recipe, and no other."""
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.txt"):
        file.unlink()
    for name in recipe_names():
        (FOLDER / f"{name}.txt").write_text(text_of(name), encoding="utf-8")
    print(FOLDER)
