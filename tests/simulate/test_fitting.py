"""The smallest change that fits: nothing is said to fit nowhere that some combination of settings fits."""

from itertools import product

import pytest

from narrowgauge.trainer.simulate import estimate_memory, fitting
from narrowgauge.trainer.simulate.advice import least_state
from narrowgauge.trainer.training import make_config

ALL = "master,grad,m,v"
STATES = ("fp8", "eco", "msamp-o3")  # wide, without a master, and with one


def config(recipe, length=128, micro=2, recompute=False, chunked=False, offload="", batch=2):
    training = {"batch_size": batch, "micro_batch_size": micro, "device": "cpu"}
    values = {
        "model": {"name": "debug", "layers": 1},
        "data": {"sequence_length": length},
        "training": training | {"recompute": recompute, "chunked_loss": chunked},
        "recipe": {"name": recipe} | ({"offload": offload} if offload else {}),
    }
    return make_config(values)


def least():
    """The least peak of all combinations of settings and kinds of state, one by one."""
    every = product(STATES, (128,), (1, 2), (False, True), (False, True), ("", ALL))
    return min(estimate_memory(config(*one)).peak for one in every)


@pytest.mark.tier("thorough")
def test_a_step_fits_where_any_combination_of_recipe_and_settings_does():
    limit = least()
    for own in STATES:
        given = config(own)
        found = fitting(given, lambda memory: memory.peak <= limit, recipes=STATES)
        assert found is not None, own
        assert found[1].peak == limit
        assert fitting(given, lambda memory: memory.peak < limit, recipes=STATES) is None, own


@pytest.mark.tier("thorough")
def test_a_shorter_sequence_is_the_last_resort():
    limit = estimate_memory(config("eco", 128, 1, True, False, ALL)).peak
    found = fitting(config("eco", 256), lambda memory: memory.peak <= limit, recipes=["eco"])
    assert found is not None
    assert "--data.sequence_length 128" in found[0]
    assert found[1].peak <= limit


def test_the_least_state_is_that_of_the_narrowest_recipe():
    """The weights of 8 bits, with the rest in the host's memory; else the state of MS-AMP."""
    for has_host, own, least in ((True, 4, 1), (False, 16, (16 + 8 + 8 + 16) / 8)):
        state = least_state(config("fp8"), has_host)
        assert (state[""], min(state.values())) == (own, least)
