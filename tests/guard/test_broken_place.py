"""Which place broke, from the lines of gauges: of the step that went wrong, and of one that did not."""

from narrowgauge.guard.broken_place import find_broken

WIDE = {"fp32", "bf16"}


def reading(layer, place, cast="e4m3", underflow=0.0, clipped=0.0, sqnr_db=31.0):
    figures = {"underflow": underflow, "clipped": clipped, "sqnr_db": sqnr_db}
    return {"layer": layer, "place": place, "cast": cast, **figures}


def product(layer, place, cosine):
    return {"layer": layer, "place": place, "cast": None, "cosine": cosine, "sqnr_db": None}


def found(now, before=()):
    broken = find_broken(now, before, WIDE)
    return None if broken is None else (broken.place, broken.layers)


def test_what_was_so_before_did_not_break():
    usual = [reading("a", "dgrad.dy", "nvfp4", underflow=0.25), reading("b", "fprop.x", clipped=0.03)]
    assert found(usual, usual) is None
    worse = [reading("a", "dgrad.dy", "nvfp4", underflow=0.27), reading("b", "fprop.x", clipped=0.4)]
    assert found(worse, usual) == ("fprop.x", ("b",))


def test_half_is_too_much_whatever_was_before():
    usual = [reading("a", "dgrad.dy", "fp16", underflow=0.9), reading("b", "dgrad.dy", "fp16", underflow=0.2)]
    assert found(usual, usual) == ("dgrad.dy", ("a",))
    assert found(usual) == ("dgrad.dy", ("a",)), "and if nothing is known of before"


def test_no_underflow_of_v_is_harmless():
    usual = [
        reading("a", "v", underflow=0.1),
        reading("b", "v", underflow=0.005),
        reading("c", "m", underflow=0.1),
    ]
    assert found(usual, usual) == ("v", ("a",))
    assert found([], usual) == ("v", ("a",)), "a bad step makes no update, and shows no v"


def test_the_loss_of_a_whole_tensor_is_seen_in_its_noise():
    assert found([reading("a", "fprop.w", sqnr_db=-10.0)], [reading("a", "fprop.w")]) == ("fprop.w", ("a",))


def test_a_product_speaks_for_the_operand_that_loses_more():
    before = [reading("a", "fprop.x"), reading("a", "fprop.w"), product("a", "fprop.y", 0.999)]
    now = [reading("a", "fprop.x", sqnr_db=20.0), reading("a", "fprop.w"), product("a", "fprop.y", 0.7)]
    assert found(now, before) == ("fprop.x", ("a",))
    shared = [reading("a", "fprop.w", sqnr_db=20.0), product("a", "dgrad.dx", 0.7)]
    assert found(shared, before) == ("fprop.w", ("a",)), "dgrad.w shares its numbers, and has no line"


def test_wide_casts_and_places_that_cannot_be_raised_are_passed_over():
    now = [reading("a", "fprop.x", "bf16", clipped=0.9), reading("a", "saved", clipped=0.9)]
    assert found(now) is None


def test_the_worst_of_all_processes_counts_and_all_layers_of_the_place():
    now = [reading("a", "fprop.x", clipped=c) for c in (0.0, 0.6)] + [reading("b", "fprop.x", clipped=0.55)]
    broken = find_broken(now, [], WIDE)
    assert (broken.place, broken.layers, broken.lost) == ("fprop.x", ("a", "b"), 0.6)
    assert str(broken) == "fprop.x loses 0.6 of its numbers in e4m3 (a and 1 more)"
