"""The tables [experiment] and [arms] of a configuration file, which `train` does not read."""

from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.experiment.grid import Variant

KEYS = (
    *("rungs", "seeds", "jobs", "threads", "products", "attention", "held_out_tokens", "order"),
    *("fork", "rows", "probe"),
)


def take_arms(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Variant]]:
    """Split off the table [arms]: the other values, and a variant for each arm.

    Raises:
        UserError: an arm is not a table of sections.
    """
    arms = []
    for name, table in values.get("arms", {}).items():
        if not isinstance(table, Mapping) or not all(isinstance(t, Mapping) for t in table.values()):
            raise UserError(
                f"[arms] {name} = {table!r}: an arm has keys with their sections; write recipe.name = "
                f"{name!r} below [arms.{name}]"
            )
        keys = {f"{section}.{key}": value for section, t in table.items() for key, value in t.items()}
        arms.append(Variant(name, keys))
    return {section: table for section, table in values.items() if section != "arms"}, arms


def take_experiment(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split off the table [experiment]: the other values, and the table.

    Raises:
        UserError: a key of it is unknown.
    """
    table = dict(values.get("experiment", {}))
    for key in table:
        if key not in KEYS:
            raise unknown("key of [experiment]", key, KEYS)
    return {section: t for section, t in values.items() if section != "experiment"}, table


def require_order(table: Mapping[str, Any], arms: Sequence[Variant]) -> None:
    """Check that `order` names arms; it lists groups of arms, each finished before the next begins.

    Raises:
        UserError: it is not a list of lists, or a name is unknown.
    """
    names, order = [arm.name for arm in arms], table.get("order", [])
    if not isinstance(order, list) or not all(isinstance(group, list) for group in order):
        raise UserError(f"[experiment] order = {order!r} must be a list of lists of arms")
    for name in (name for group in order for name in group):
        if name not in names:
            raise unknown("arm in order", name, names)


def choose_arms(arms: Sequence[Variant], chosen: Sequence[str]) -> list[Variant]:
    """The arms of these names, in the order of the file; always including the reference. All without one."""
    if not chosen:
        return list(arms)
    for name in chosen:
        if name not in [arm.name for arm in arms]:
            raise unknown("arm", name, [arm.name for arm in arms])
    return [arm for arm in arms if arm is arms[0] or arm.name in chosen]
