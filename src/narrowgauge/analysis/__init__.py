"""Which number hurts? Probes of a trained model, without training."""

from narrowgauge.analysis.budget import Budget, bits_budget, flops_budget, require_solver, time_budget
from narrowgauge.analysis.probe import RecipeProbe, probe, probe_json
from narrowgauge.analysis.probe_run import Probed, open_probed, update_rule
from narrowgauge.analysis.recipe_text import recipe_text
from narrowgauge.analysis.search import BASELINES, Assignment, Choices, baselines, choices_of, solve
from narrowgauge.analysis.sensitivity import (
    Cost,
    estimate_costs,
    exact_costs,
    relative_errors,
    sensitivity_json,
    worst,
)

__all__ = [
    "BASELINES",
    "Assignment",
    "Budget",
    "Choices",
    "Cost",
    "Probed",
    "RecipeProbe",
    "baselines",
    "bits_budget",
    "choices_of",
    "estimate_costs",
    "exact_costs",
    "flops_budget",
    "open_probed",
    "probe",
    "probe_json",
    "recipe_text",
    "relative_errors",
    "require_solver",
    "sensitivity_json",
    "solve",
    "time_budget",
    "update_rule",
    "worst",
]
