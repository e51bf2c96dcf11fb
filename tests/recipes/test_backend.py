"""Which code runs a recipe: always said, and refused in a sentence."""

import pytest

from narrowgauge.errors import UserError
from narrowgauge.recipes import BACKENDS, choose_backend, recipe, recipe_names

NARROW = [n for n in recipe_names() if recipe(n).is_narrow]


@pytest.mark.parametrize("wish", BACKENDS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_references_are_native_everywhere(name, device, wish):
    backend = choose_backend(recipe(name), device, wish)
    assert backend.name == "native"
    assert backend.reason == f"torch multiplies {name} itself"


@pytest.mark.parametrize("wish", ["auto", "emulated"])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_recipes_are_emulated_on_a_cpu_and_say_why(name, wish):
    backend = choose_backend(recipe(name), "cpu", wish)
    assert backend.name == "emulated"
    assert backend.reason == "a CPU has no narrow matrix units; the same numbers in bf16 GEMMs"


def test_one_narrow_place_makes_a_recipe_emulated():
    mixed = recipe("fp32").with_places({"wgrad.x": "mxfp8"})
    backend = choose_backend(mixed, "cpu")
    assert (backend.name, backend.reason.endswith("in fp32 GEMMs")) == ("emulated", True)


@pytest.mark.parametrize("name", NARROW)
def test_native_is_refused_on_a_cpu_with_the_reason_and_the_way_out(name):
    with pytest.raises(UserError) as caught:
        choose_backend(recipe(name), "cpu", "native")
    assert str(caught.value) == (
        f"recipe '{name}' cannot run natively here: a CPU has no narrow matrix units; "
        "use --backend emulated (the same numbers, computed in bf16)"
    )


def test_an_unknown_wish():
    with pytest.raises(UserError, match="unknown backend 'emulate'; the nearest is 'emulated'"):
        choose_backend(recipe("bf16"), "cpu", "emulate")
