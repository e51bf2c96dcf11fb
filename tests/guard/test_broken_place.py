"""Which place broke, from the lines of gauges: of the step that went wrong, and of one that did not."""

import pytest

from narrowgauge.guard.broken_place import find_broken

WIDE = {"fp32", "bf16"}


def reading(layer, place, cast="e4m3", underflow=0.0, clipped=0.0, sqnr_db=31.0):
    figures = {"underflow": underflow, "clipped": clipped, "sqnr_db": sqnr_db}
    return {"layer": layer, "place": place, "cast": cast, **figures}


def product(layer, place, cosine):
    return {"layer": layer, "place": place, "cast": None, "cosine": cosine, "sqnr_db": None}


DY, X = reading("a", "dgrad.dy", "nvfp4", underflow=0.25), reading("b", "fprop.x", clipped=0.03)
HALF = [reading("a", "dgrad.dy", "fp16", underflow=0.9), reading("b", "dgrad.dy", "fp16", underflow=0.2)]
V = [reading("a", "v", underflow=0.1), reading("b", "v", underflow=0.005), reading("c", "m", underflow=0.1)]
OPERANDS = [reading("a", "fprop.x"), reading("a", "fprop.w"), product("a", "fprop.y", 0.999)]
#: The lines now and before, and the place and its layers.
CASES = {
    "what was so before did not break": ([DY, X], [DY, X], None),
    "only what became worse did": (
        [DY | {"underflow": 0.27}, X | {"clipped": 0.4}],
        [DY, X],
        ("fprop.x", ("b",)),
    ),
    "half is too much whatever was before": (HALF, HALF, ("dgrad.dy", ("a",))),
    "and if nothing is known of before": (HALF, [], ("dgrad.dy", ("a",))),
    "no underflow of v is harmless": (V, V, ("v", ("a",))),
    "a bad step makes no update, and shows no v": ([], V, ("v", ("a",))),
    "the loss of a whole tensor is seen in its noise": (
        [reading("a", "fprop.w", sqnr_db=-10.0)],
        [reading("a", "fprop.w")],
        ("fprop.w", ("a",)),
    ),
    "a product speaks for the operand that loses more": (
        [reading("a", "fprop.x", sqnr_db=20.0), reading("a", "fprop.w"), product("a", "fprop.y", 0.7)],
        OPERANDS,
        ("fprop.x", ("a",)),
    ),
    "dgrad.w shares the numbers of fprop.w, and has no line": (
        [reading("a", "fprop.w", sqnr_db=20.0), product("a", "dgrad.dx", 0.7)],
        OPERANDS,
        ("fprop.w", ("a",)),
    ),
    "wide casts and places that cannot be raised are passed over": (
        [reading("a", "fprop.x", "bf16", clipped=0.9), reading("a", "saved", clipped=0.9)],
        [],
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_place_that_broke_is_found(case):
    now, before, expected = CASES[case]
    broken = find_broken(now, before, WIDE)
    assert (None if broken is None else (broken.place, broken.layers)) == expected


def test_the_worst_of_all_processes_counts_and_all_layers_of_the_place():
    now = [reading(layer, "fprop.x", clipped=c) for layer, c in (("a", 0.6), ("a", 0.0), ("b", 0.55))]
    broken = find_broken(now, [], WIDE)
    assert (broken.place, broken.layers, broken.lost) == ("fprop.x", ("a", "b"), 0.6)
    assert str(broken) == "fprop.x loses 0.6 of its numbers in e4m3 (a and 1 more)"
