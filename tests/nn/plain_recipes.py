"""The recipes whose weights and gradients are ordinary fp32 parameters (others: `test_weight_state.py`), and
whose rules wait for no schedule, which a layer by itself has not (`tests/recipes/test_rules.py`). Those that
narrow attention, too, need a model that has some (`test_attention.py`)."""

from narrowgauge.recipes import recipe, recipe_names


def _is_plain(name: str) -> bool:
    state = recipe(name).state
    is_wide = state["weight"].name == state["grad"].name == "fp32"
    return is_wide and not follows_schedule(name) and not recipe(name).narrows_attention


def follows_schedule(name: str) -> bool:
    """Whether a rule of the recipe begins or ends with the decay of the learning rate."""
    return any(rule.follows_schedule for rule in recipe(name).rules)


PLAIN = [name for name in recipe_names() if _is_plain(name)]
