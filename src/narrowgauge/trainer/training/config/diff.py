"""A configuration as a run stores it: its text, its trajectory, and the changes that a resume may make.

The text is complete and reproduces the configuration. Its trajectory consists of the values that determine
every loss.

A value that changes the trajectory may only change explicitly: `--allow-change optimizer.lr,training.steps`.
The keys are the configuration's, and `code.torch` for another version of torch. Then

    1. the checkpoint is restored under the new values; if that fails, nothing has changed
    2. identity.json keeps the run id of the checkpoints, which is a digest of the original values
    3. an event with the old and the new values is recorded, then recipe.toml and config.toml are written

so that the same command line without `--allow-change` continues the run.

One value needs no permission: `training.micro_batch_size`, if the user did not set it. Another number of
processes may require another one (`config`); the change is reported and recorded like the others.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.system.toml_text import toml_tables
from narrowgauge.trainer.training.config.config import Config, config_keys
from narrowgauge.trainer.training.config.synonyms import Key, unknown_key

TORCH = "code.torch"
ConfigDiff = Mapping[str, tuple[object, object]]  # key -> (old value, new value)


def to_toml(config: Config) -> str:
    """The complete resolved configuration as TOML, which reproduces the run."""
    tables = config.model_dump()
    start = {"weights": config.model.weights} if config.model.weights else {}
    tables["model"] = {"name": config.model.name} | start | asdict(config.spec.model)
    tables["recipe"] |= tables["recipe"].pop("places")
    return toml_tables(tables)


# Keys added after runs that may still be resumed, each with the value that changes nothing. With that value
# they are left out of a trajectory, so that the id of such a run stays the same.
ADDED = {
    "model.qk_norm": False,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "training.z_loss": 0.0,
    "model.experts": 0,
    "model.experts_per_token": 2,
    "model.norm_topk_prob": True,
    "training.balance_loss": 0.01,
    "training.threads": 0,
    "training.rounding_seed": -1,
}


# Keys of [training] that change no loss.
_NO_DIGITS = ("memory_limit", "hang_timeout", "recompute_every", "fit_micro_batch", "deterministic", "graph")


def trajectory(config: Config) -> dict[str, dict[str, Any]]:
    """The resolved values that determine every loss of the run, without display and storage settings."""
    tables = tomllib.loads(to_toml(config))
    for key in _NO_DIGITS:
        del tables["training"][key]
    tables["schedule"]["decay_steps"] = 0  # a key that is gone, and a part of the ids of runs
    for place in ("offload", "gather"):  # neither location nor transport changes a value
        tables["recipe"].pop(place, None)
    guard = tables["guard"]
    kept = ["max_skips"]
    if guard["spike"] not in ("off", "warn"):  # those two do not affect steps
        kept += ["spike", "spike_factor", "spike_window", "max_rollbacks"]
    if guard["spike"] == "raise":
        kept.append("raise_to")
    tables["guard"] = {key: guard[key] for key in kept}
    if guard["spike"] == "raise":  # keys that are gone, too
        tables["guard"] |= {"raise_steps": math.inf, "raise_budget": 4, "lower_after": 0}
    for name, neutral in ADDED.items():
        section, key = name.split(".")
        if tables[section][key] == neutral:
            del tables[section][key]
    excluded = ("log", "checkpoint", "validation", "gauges", "parallel")
    return {section: t for section, t in tables.items() if section not in excluded}


def config_diff(saved: Config, current: Config) -> dict[str, tuple[object, object]]:
    """Every `section.key` that changes the trajectory between two configurations: (old, new) value."""
    old, new = trajectory(saved), trajectory(current)
    changes = {}
    for section in sorted(old.keys() | new.keys(), key=list(Config.model_fields).index):
        a, b = old.get(section, {}), new.get(section, {})
        for key in sorted(a.keys() | b.keys()):
            name = f"{section}.{key}"
            values = a.get(key, ADDED.get(name)), b.get(key, ADDED.get(name))
            if values[0] != values[1]:
                changes[name] = values
    return changes


def check_keys(allowed: Sequence[str]) -> None:
    """Check that every name is a key.

    Raises:
        UserError: a name is unknown; the message names the nearest key.
    """
    known = config_keys() | {TORCH: Key("the version of torch", "", "VERSION")}
    for key in allowed:
        if key not in known:
            raise UserError(f"--allow-change: {unknown_key(key, known)}")


def require_allowed(path: object, changes: ConfigDiff, allowed: Sequence[str]) -> None:
    """Check that every difference is explicitly allowed.

    Raises:
        UserError: some are not; the message lists them all.
    """
    refused = {key: values for key, values in changes.items() if key not in allowed}
    if refused:
        differences = "; with ".join(_difference_text(key, *values) for key, values in refused.items())
        keys = ",".join(dict.fromkeys([*allowed, *refused]))
        raise UserError(
            f"{path} holds a run with {differences}; restore the old value, "
            f"allow the change with --allow-change {keys}, or start a new run with another --out"
        )


def _difference_text(key: str, old: object, new: object) -> str:
    if key == "recipe.name" and old == new:
        return f"another text of recipe {new!r} (recipe.toml there)"
    return f"{key} = {old!r}, and now it is {new!r}"
