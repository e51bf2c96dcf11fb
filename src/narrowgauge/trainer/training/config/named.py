"""Configurations by name: `narrowgauge train gpt3-345m` works without a checkout.

A name is a file in `shipped/` of this folder, or a model whose training is published
(`models/published.toml`).
"""

from typing import Any

from narrowgauge.system.files import shipped_names, shipped_text
from narrowgauge.system.toml_text import parse_toml
from narrowgauge.trainer.models.published import Published, published, published_names

Values = dict[str, dict[str, Any]]
_FOLDER = "trainer/training/config/shipped"


def config_names() -> list[str]:
    """Sorted names of the configurations that ship."""
    return sorted({*shipped_names(_FOLDER), *published_names()})


def named_config(name: str) -> Values | None:
    """The values of a named configuration; None if there is none of this name."""
    if name in shipped_names(_FOLDER):
        return parse_toml(shipped_text(_FOLDER, name), f"configuration {name}")
    found = published(name)
    return None if found is None else published_config(name, found)


def published_config(name: str, found: Published, steps: int | None = None) -> Values:
    """The values of a published training; other than its steps shorten the warm-up to a tenth of them."""
    count, warmup = steps or found.steps, found.warmup_steps
    values: Values = {
        "model": {"name": name},
        "data": {"sequence_length": found.sequence_length},
        "training": {"steps": count, "batch_size": found.batch_size},
        "optimizer": {"lr": found.lr},
        "schedule": {
            "warmup_steps": warmup if count >= found.steps else max(1, min(warmup, count // 10)),
            "final_lr_fraction": found.final,
        },
    }
    if found.weight_decay is not None:
        values["optimizer"]["weight_decay"] = found.weight_decay
    return values


def with_published(values: Values) -> tuple[Values, str]:
    """The values, with missing keys from the model's published training, and a sentence about it.

    A model without one, or with a published training of which every key is given, leaves the values as they
    are, and the sentence is empty.
    """
    name = values.get("model", {}).get("name", "")
    if (found := published(name)) is None:
        return values, ""
    given = str(values.get("training", {}).get("steps", ""))
    steps = int(given) if given.isdecimal() else None
    defaults = published_config(name, found, steps)
    merged = {key: {**defaults.get(key, {}), **values.get(key, {})} for key in {**defaults, **values}}
    if merged == values:
        return values, ""
    note = f"; {found.note}" if found.note else ""
    return merged, f"what the line leaves out is as published: {found.source}{note}"
