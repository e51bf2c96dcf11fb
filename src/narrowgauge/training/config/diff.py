"""Differences between the configuration of a run and the one it is resumed with: refused, or allowed by name.

A value that changes the trajectory may only change on purpose: `--allow-change optimizer.lr,training.steps`.
The keys are those of the configuration, and `code.torch` for another version of torch. Then

    1. the checkpoint is restored under the new values; if that fails, nothing has changed
    2. identity.json keeps the run id of the checkpoints, which is a digest of the original values
    3. an event with the old and the new values is recorded, then recipe.toml and config.toml are written

so that the same command line without `--allow-change` continues the run.

One value needs no permission: `training.micro_batch_size` where the user gave none. Another number of
processes may need another one (`micro_batch`); it is said, and recorded like the others.
"""

from collections.abc import Mapping, Sequence

from narrowgauge.errors import UserError
from narrowgauge.training.config.config import ADDED, Config, config_keys, trajectory
from narrowgauge.training.config.synonyms import unknown_key

TORCH = "code.torch"
ConfigDiff = Mapping[str, tuple[object, object]]  # key -> (old value, new value)


def config_diff(saved: Config, current: Config) -> dict[str, tuple[object, object]]:
    """Every `section.key` that changes the trajectory between two configurations, with (old, new) value."""
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
    known = [*config_keys(), TORCH]
    for key in allowed:
        if key not in known:
            raise UserError(f"--allow-change: {unknown_key(key, known)}")


def require_allowed(path: object, changes: ConfigDiff, allowed: Sequence[str]) -> None:
    """Check that every difference was allowed by name.

    Raises:
        UserError: some were not; the message lists all of them.
    """
    refused = {key: values for key, values in changes.items() if key not in allowed}
    if refused:
        differences = "; with ".join(_difference_text(key, *values) for key, values in refused.items())
        keys = ",".join(dict.fromkeys([*allowed, *refused]))
        raise UserError(
            f"{path} holds a run with {differences}; restore what it began with, "
            f"let it through with --allow-change {keys}, or start a new run with another --out"
        )


def _difference_text(key: str, old: object, new: object) -> str:
    if key == "recipe.name" and old == new:
        return f"another text of recipe {new!r} (recipe.toml there)"
    return f"{key} = {old!r}, and now it is {new!r}"
