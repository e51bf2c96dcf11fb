"""Which number hurts? Probes of a trained model, without training."""

from narrowgauge.analysis.probe import RecipeProbe, probe, probe_json
from narrowgauge.analysis.probe_run import Probed, open_probed, update_rule
from narrowgauge.analysis.sensitivity import Cost, estimate_costs, exact_costs, sensitivity_json, worst

__all__ = [
    "Cost",
    "Probed",
    "RecipeProbe",
    "estimate_costs",
    "exact_costs",
    "open_probed",
    "probe",
    "probe_json",
    "sensitivity_json",
    "update_rule",
    "worst",
]
