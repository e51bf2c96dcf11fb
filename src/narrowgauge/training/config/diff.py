"""A run that comes back with other values than it began with: refused with all differences, or let through.

What moves the trajectory may only change on purpose, by name: `--allow-change optimizer.lr,training.steps`.
The keys are those of the configuration, and `code.torch` for another version of torch. Then

    1. the checkpoint is restored under the new values; where it cannot be, nothing was changed
    2. identity.json keeps the name under which the run's checkpoints are known, which is made of the values
       that it began with
    3. an event with the old and the new values is recorded, then recipe.toml and config.toml are written

so that the same line without `--allow-change` goes on from there.
"""

from collections.abc import Mapping, Sequence

from narrowgauge.errors import UserError, unknown
from narrowgauge.training.config.config import Config, config_keys, trajectory

TORCH = "code.torch"
ConfigDiff = Mapping[str, tuple[object, object]]  # key -> what it was, what it is


def config_diff(there: Config, here: Config) -> dict[str, tuple[object, object]]:
    """Every `section.key` by which two configurations make another trajectory, with both values."""
    old, new = trajectory(there), trajectory(here)
    found = {}
    for section in sorted(old.keys() | new.keys(), key=list(Config.model_fields).index):
        a, b = old.get(section, {}), new.get(section, {})
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                found[f"{section}.{key}"] = a.get(key), b.get(key)
    return found


def check_keys(allowed: Sequence[str]) -> None:
    """Raise `UserError` for a name that is no key, with the nearest one."""
    known = [*config_keys(), TORCH]
    for key in allowed:
        if key not in known:
            raise unknown("key", f"--allow-change {key}", known)


def require_allowed(path: object, changes: ConfigDiff, allowed: Sequence[str]) -> None:
    """Raise `UserError` with every difference that was not allowed by name."""
    refused = {key: values for key, values in changes.items() if key not in allowed}
    if refused:
        told = "; with ".join(_words(key, *values) for key, values in refused.items())
        raise UserError(
            f"{path} holds a run with {told}; restore what it began with, let it through with --allow-change "
            f"{','.join(refused)}, or start a new run with another --out"
        )


def _words(key: str, old: object, new: object) -> str:
    if key == "recipe.name" and old == new:
        return f"another text of recipe {new!r} (recipe.toml there)"
    return f"{key} = {old!r}, and now it is {new!r}"
