"""Covering arrays of `support.covering`."""

from itertools import product

from support.covering import covering

SHAPES = {f"{n}": [f"{kind} {n // size % 3}" for kind, size in (("a", 1), ("b", 3))] for n in range(9)}
GRIDS = {"whole": [], "rows": ["r"], "columns": ["c"], "both": ["r", "c"]}


def test_covering_has_every_pair_of_properties_and_every_key():
    chosen = covering(SHAPES, GRIDS)
    pairs = {pair for shape, grid in chosen for pair in product(SHAPES[shape], GRIDS[grid])}
    assert pairs == set(product([f"{kind} {n}" for kind in "ab" for n in range(3)], "rc"))
    assert {shape for shape, _ in chosen} == set(SHAPES)
    assert {grid for _, grid in chosen} == set(GRIDS)


def test_covering_is_small_and_the_same_each_time():
    chosen = covering(SHAPES, GRIDS)
    assert len(set(chosen)) == len(chosen) <= 10 < len(SHAPES) * len(GRIDS)
    assert covering(SHAPES, GRIDS) == chosen
