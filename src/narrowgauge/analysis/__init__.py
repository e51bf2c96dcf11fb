"""Analyses of a trained model without training: the quantization of which values hurts?"""

from narrowgauge.analysis.budget import Budget, bits_budget, flops_budget, require_solver, time_budget
from narrowgauge.analysis.pace import pace
from narrowgauge.analysis.probe import RecipeProbe, probe, probe_json
from narrowgauge.analysis.probe_run import Probed, open_probed, step_metric
from narrowgauge.analysis.recipe_text import recipe_text
from narrowgauge.analysis.search import BASELINES, Assignment, Choices, baselines, choices_of, solve
from narrowgauge.analysis.sensitivity import (
    NATS,
    Cost,
    backward_costs,
    exact_backward_costs,
    forward_costs,
    in_order,
    relative_errors,
    sensitivity_json,
    worst,
)
from narrowgauge.analysis.update import StepMetric

__all__ = [
    "BASELINES",
    "NATS",
    "Assignment",
    "Budget",
    "Choices",
    "Cost",
    "Probed",
    "RecipeProbe",
    "StepMetric",
    "backward_costs",
    "baselines",
    "bits_budget",
    "choices_of",
    "exact_backward_costs",
    "flops_budget",
    "forward_costs",
    "in_order",
    "open_probed",
    "pace",
    "probe",
    "probe_json",
    "recipe_text",
    "relative_errors",
    "require_solver",
    "sensitivity_json",
    "solve",
    "step_metric",
    "time_budget",
    "worst",
]
