"""Which number hurts? Probes of a trained model, without training."""

from narrowgauge.analysis.probe import RecipeProbe, probe, probe_json
from narrowgauge.analysis.probe_run import open_probed

__all__ = ["RecipeProbe", "open_probed", "probe", "probe_json"]
