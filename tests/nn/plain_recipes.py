"""The recipes whose weights and gradients are ordinary fp32 parameters (others: `test_weight_state.py`), and
whose rules wait for no step, which a layer by itself does not know (`tests/recipes/test_rules.py`). Those
that also narrow attention need a model that has some (`test_attention.py`)."""

from narrowgauge.recipes import recipe, recipe_names


def _is_plain(name: str) -> bool:
    state = recipe(name).state
    is_wide = state["weight"].name == state["grad"].name == "fp32"
    return is_wide and not waits(name) and not recipe(name).narrows_attention


def waits(name: str) -> bool:
    """Whether a rule of the recipe begins or ends at some time of a run."""
    return any(rule.is_timed for rule in recipe(name).rules)


PLAIN = [name for name in recipe_names() if _is_plain(name)]
