"""Every recipe that ships trains, repeats itself, and continues after a stop to the same digits."""

import pytest

from narrowgauge.recipes import recipe_names
from support.runs import interrupted


# Each commit: tests/golden, by steps under each recipe; loop/test_loop.py under those with most state.
@pytest.mark.tier("nightly", keep=("fp8-delayed", "coat", "fp16"))
@pytest.mark.tier("thorough")  # whole runs
@pytest.mark.parametrize("name", recipe_names())
def test_a_run_repeats_and_goes_on_to_the_same_digits(train, look, name):
    # The second half of the steps is the schedule's fall, from which on `nvfp4-finish` has other casts.
    changes = {"recipe.name": name, "schedule.kind": "wsd", "schedule.decay_fraction": 0.5}
    first, again = train("first", changes), train("again", changes)
    expected = look(first).trajectory
    assert look(again).trajectory == expected
    assert all(line["loss"] < 6 for line in look(first).steps)
    interrupted(again, 6)
    train("again", changes)
    assert [event["step"] for event in look(again).events("resume")] == [4]
    assert look(again).trajectory == expected
