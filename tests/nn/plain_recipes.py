"""The recipes whose weights and gradients are ordinary fp32 parameters (others: `test_weight_state.py`)."""

from narrowgauge.recipes import recipe, recipe_names


def _is_plain(name: str) -> bool:
    state = recipe(name).state
    return state["weight"].name == state["grad"].name == "fp32"


PLAIN = [name for name in recipe_names() if _is_plain(name)]
