"""Which number hurts? Probes of a trained model, without training."""

from narrowgauge.analysis.probe import RecipeProbe, probe, probe_json
from narrowgauge.analysis.probe_run import Probed, open_probed, update_rule
from narrowgauge.analysis.recipe_text import recipe_text
from narrowgauge.analysis.search import baselines, choices_of, require_choice, solve
from narrowgauge.analysis.sensitivity import (
    Cost,
    estimate_costs,
    exact_costs,
    relative_errors,
    sensitivity_json,
    worst,
)

__all__ = [
    "Cost",
    "Probed",
    "RecipeProbe",
    "baselines",
    "choices_of",
    "estimate_costs",
    "exact_costs",
    "open_probed",
    "probe",
    "probe_json",
    "recipe_text",
    "relative_errors",
    "require_choice",
    "sensitivity_json",
    "solve",
    "update_rule",
    "worst",
]
