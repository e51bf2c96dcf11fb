"""Tiers: which tests `make test` runs, and what runs the others.

`@pytest.mark.tier("thorough", keep=...)` at a test moves it to the thorough tier but for the parameters that
`keep` names: a number keeps the first ones; names keep those whose id, or one of whose values, is a name (a
tuple is a set of values). With `nightly=...`, which names in the same way, all others are nightly. A comment
next to it names the earlier test of the same. Without the marker a test is quick. As a mark of parameters,
`tier` moves these.

No recipe is special to code that treats recipes as data. Of a test over `MANY` recipes or more the thorough
tier therefore keeps those that together have every pair of properties (`covering.representatives`); all
others are nightly.
"""

from collections import Counter
from typing import Any

import pytest

from narrowgauge.recipes import recipe_names
from support.covering import representatives

#: After the quick tier. Where several markers apply, the last tier of this list wins.
TIERS = ("thorough", "nightly")
MANY = 15
RECIPES = frozenset(recipe_names())


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, which `-m` then selects."""
    counts: Counter[object] = Counter()
    unknown: dict[str, bool] = {}
    recipes: dict[tuple[str, str], set[str]] = {}
    for item in items:
        for argument, name in _recipes(item):
            recipes.setdefault((item.nodeid.partition("[")[0], argument), set()).add(name)
    for item in items:
        test = item.nodeid.partition("[")[0]
        for tier in reversed(TIERS):
            moves = [_moves(keep, (test, tier), item, counts, unknown) for keep in _kept(item, tier)]
            if any(moves):
                of_many = [name for argument, name in _recipes(item) if len(recipes[test, argument]) >= MANY]
                item.add_marker(tier if set(of_many) <= representatives() else "nightly")
                break
    never = [name for name, is_unknown in unknown.items() if is_unknown]
    if never and not any("::" in argument for argument in config.args):  # else only some were collected
        raise pytest.UsageError(f"`keep` names parameters that do not exist: {', '.join(never)}")


def _kept(item: pytest.Item, tier: str) -> list[Any]:
    """What each mark of an item keeps from a tier."""
    marks = list(item.iter_markers("tier"))
    own = [mark.kwargs.get("keep", 0) for mark in marks if mark.args == (tier,)]
    return own + [mark.kwargs[tier] for mark in marks if tier in mark.kwargs]


def _moves(
    keep: Any, moved: tuple[str, str], item: pytest.Item, counts: Counter[object], unknown: dict[str, bool]
) -> bool:
    """Whether a mark moves an item; counts the items of `keep` and finds its names among theirs."""
    if isinstance(keep, int):
        counts[moved] += keep > 0
        return counts[moved] > keep or not keep
    names = _names(item)
    found = {name: name in names for name in map(_name, keep)}
    for name, is_found in found.items():
        key = f"{moved[0]}: {name}"
        unknown[key] = unknown.get(key, True) and not is_found
    return not any(found.values())


def _recipes(item: pytest.Item) -> list[tuple[str, str]]:
    """(argument, recipe) of each parameter of an item that is the name of a shipped recipe."""
    spec = getattr(item, "callspec", None)
    params = {} if spec is None else spec.params
    return [(argument, v) for argument, v in params.items() if isinstance(v, str) and v in RECIPES]


def _name(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _names(item: pytest.Item) -> set[str]:
    """The id of an item's parameters, and each value."""
    spec = getattr(item, "callspec", None)
    return {spec.id, *map(str, spec.params.values())} if spec else set()
