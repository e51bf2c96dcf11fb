"""Analyses of a trained model without training: the quantization of which values hurts?"""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.trainer.analysis.budget import Budget as Budget
    from narrowgauge.trainer.analysis.budget import flops_budget as flops_budget
    from narrowgauge.trainer.analysis.forks import Forks as Forks
    from narrowgauge.trainer.analysis.forks import only_in as only_in
    from narrowgauge.trainer.analysis.probe import RecipeProbe as RecipeProbe
    from narrowgauge.trainer.analysis.probe import probe as probe
    from narrowgauge.trainer.analysis.probe import probe_json as probe_json
    from narrowgauge.trainer.analysis.probe_run import Probed as Probed
    from narrowgauge.trainer.analysis.probe_run import open_probed as open_probed
    from narrowgauge.trainer.analysis.probe_run import step_metric as step_metric
    from narrowgauge.trainer.analysis.recipe_text import recipe_text as recipe_text
    from narrowgauge.trainer.analysis.search import BASELINES as BASELINES
    from narrowgauge.trainer.analysis.search import Assignment as Assignment
    from narrowgauge.trainer.analysis.search import Choices as Choices
    from narrowgauge.trainer.analysis.search import Gemm as Gemm
    from narrowgauge.trainer.analysis.search import baselines as baselines
    from narrowgauge.trainer.analysis.search import choices_of as choices_of
    from narrowgauge.trainer.analysis.search import solve as solve
    from narrowgauge.trainer.analysis.sensitivity import NATS as NATS
    from narrowgauge.trainer.analysis.sensitivity import Cost as Cost
    from narrowgauge.trainer.analysis.sensitivity import backward_costs as backward_costs
    from narrowgauge.trainer.analysis.sensitivity import exact_backward_costs as exact_backward_costs
    from narrowgauge.trainer.analysis.sensitivity import forward_costs as forward_costs
    from narrowgauge.trainer.analysis.sensitivity import in_order as in_order
    from narrowgauge.trainer.analysis.sensitivity import relative_errors as relative_errors
    from narrowgauge.trainer.analysis.sensitivity import sensitivity_json as sensitivity_json
    from narrowgauge.trainer.analysis.sensitivity import worst as worst
    from narrowgauge.trainer.analysis.update import StepMetric as StepMetric
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
