"""Covering arrays: few cases that show every pair of a property of one thing and a property of another."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from typing import TypeVar

from narrowgauge.recipes import recipe, recipe_names

A = TypeVar("A", bound=Hashable)
B = TypeVar("B", bound=Hashable)


def covering(
    first: Mapping[A, Iterable[Hashable]], second: Mapping[B, Iterable[Hashable]]
) -> list[tuple[A, B]]:
    """Pairs of keys that together have every pair of a property of `first` and a property of `second`.

    Each key is also its own property, paired with nothing: it occurs in at least one of the pairs. Greedy and
    deterministic: the next pair adds the most; of equal ones, it is the one whose key of `second` occurs
    least so far, then the first.

    Args:
        first: The properties of each key, such as the keys of casts that a recipe has.
        second: The properties of each key, such as the axes of a grid of processes.
    """
    cases: dict[tuple[A, B], set[Hashable]] = {
        (a, b): {("first", a), ("second", b), *((p, q) for p in first[a] for q in second[b])}
        for a in first
        for b in second
    }
    missing: set[Hashable] = set().union(*cases.values())
    chosen: list[tuple[A, B]] = []
    occurs: Counter[B] = Counter()
    while missing:
        best = max(cases, key=lambda case: (len(cases[case] & missing), -occurs[case[1]]))
        missing -= cases.pop(best)
        occurs[best[1]] += 1
        chosen.append(best)
    return sorted(chosen, key=lambda case: (list(first).index(case[0]), list(second).index(case[1])))


@cache
def representatives() -> frozenset[str]:
    """Few shipped recipes that together have every pair of properties that any shipped recipe has."""
    pairs = {
        name: {frozenset((a, b)) for a in found for b in found}
        for name in recipe_names()
        for found in [[*properties_of(name), recipe(name).compute]]
    }
    missing: set[frozenset[str]] = set().union(*pairs.values())
    chosen: list[str] = []
    while missing:
        chosen.append(max(pairs, key=lambda name: len(pairs[name] & missing)))
        missing -= pairs[chosen[-1]]
    return frozenset(chosen)


def properties_of(name: str) -> list[str]:
    """The properties of a recipe: the keys of its casts, the places of its state, and its parts."""
    r = recipe(name)
    state = {**r.state, "gather": r["gather"], "reduce": r["reduce"]}
    parts = {"attention": any(r.attention.values()), "saved": r.saved != "input", "rules": r.rules}
    keys = {key for cast in r.casts.values() for key in cast.changed_keys}
    narrow = {place for place, cast in state.items() if cast is not None and cast.name != "fp32"}
    return sorted(keys | narrow | {part for part, has in parts.items() if has})
