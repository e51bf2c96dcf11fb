"""Analyses of a trained model without training: the quantization of which values hurts?"""

from typing import TYPE_CHECKING

from narrowgauge.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.analysis.budget import Budget as Budget
    from narrowgauge.analysis.budget import flops_budget as flops_budget
    from narrowgauge.analysis.budget import require_solver as require_solver
    from narrowgauge.analysis.forks import Forks as Forks
    from narrowgauge.analysis.forks import alone as alone
    from narrowgauge.analysis.probe import RecipeProbe as RecipeProbe
    from narrowgauge.analysis.probe import probe as probe
    from narrowgauge.analysis.probe import probe_json as probe_json
    from narrowgauge.analysis.probe_run import Probed as Probed
    from narrowgauge.analysis.probe_run import open_probed as open_probed
    from narrowgauge.analysis.probe_run import step_metric as step_metric
    from narrowgauge.analysis.recipe_text import recipe_text as recipe_text
    from narrowgauge.analysis.search import BASELINES as BASELINES
    from narrowgauge.analysis.search import Assignment as Assignment
    from narrowgauge.analysis.search import Choices as Choices
    from narrowgauge.analysis.search import Gemm as Gemm
    from narrowgauge.analysis.search import baselines as baselines
    from narrowgauge.analysis.search import choices_of as choices_of
    from narrowgauge.analysis.search import solve as solve
    from narrowgauge.analysis.sensitivity import NATS as NATS
    from narrowgauge.analysis.sensitivity import Cost as Cost
    from narrowgauge.analysis.sensitivity import backward_costs as backward_costs
    from narrowgauge.analysis.sensitivity import exact_backward_costs as exact_backward_costs
    from narrowgauge.analysis.sensitivity import forward_costs as forward_costs
    from narrowgauge.analysis.sensitivity import in_order as in_order
    from narrowgauge.analysis.sensitivity import relative_errors as relative_errors
    from narrowgauge.analysis.sensitivity import sensitivity_json as sensitivity_json
    from narrowgauge.analysis.sensitivity import worst as worst
    from narrowgauge.analysis.update import StepMetric as StepMetric
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
