"""Reporters of others as functions of a step and its values: W&B, trackio, TensorBoard, MLflow, Lightning.

The method that a program has identifies it, so none of them is imported here, and any object with the same
method works. A reporter that fails stops the loop with its own error: the caller opened it, and knows why.
"""

from collections.abc import Callable, Mapping
from typing import Any

from narrowgauge.system.errors import UserError

Values = Mapping[str, float]
Report = Callable[[int, Values], object]


def reporter(given: Any) -> Report:
    """A function that sends the values of a step to what a program's own logging calls take.

    Args:
        given: A `SummaryWriter`; a W&B run, or the module `wandb`; `trackio`; `mlflow`; a logger of
            Lightning; or any function of a step and a dictionary.

    Raises:
        UserError: It is none of these.
    """
    if callable(getattr(given, "add_scalar", None)):  # TensorBoard
        return lambda step, values: [given.add_scalar(name, x, step) for name, x in values.items()]
    if callable(getattr(given, "log_metrics", None)):  # MLflow, Lightning
        return lambda step, values: given.log_metrics(dict(values), step=step)
    if callable(getattr(given, "log", None)):
        module = getattr(given, "__name__", "") or type(given).__module__
        if str(module).startswith("wandb"):  # joins the loop's own next call, whatever its count of steps is
            return lambda step, values: given.log({**values, "narrowgauge/step": step}, commit=False)
        return lambda step, values: given.log(dict(values), step=step)
    if callable(given):
        return lambda step, values: given(step, dict(values))
    raise UserError(
        f"{given!r} is not a reporter: it needs log (W&B, trackio), add_scalar (TensorBoard), log_metrics "
        "(MLflow, Lightning), or be a function of a step and a dictionary"
    )
