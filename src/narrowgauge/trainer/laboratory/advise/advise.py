"""`advise`: from a machine, a model and a budget to the line that trains best."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from narrowgauge.system.errors import UserError, require
from narrowgauge.trainer.cluster.plan.budget import parse_price, tokens_of
from narrowgauge.trainer.cluster.plan.cluster_spec import cluster_name, cluster_names
from narrowgauge.trainer.laboratory import arguments as given
from narrowgauge.trainer.laboratory.advise.result import Advice
from narrowgauge.trainer.laboratory.arguments import Form
from narrowgauge.trainer.models.published import published

_CLUSTERS = f"{', '.join(cluster_names())}, or a .toml file (this machine)"


def advise(
    model: given.NamedModel,
    cluster: Annotated[str | None, Form("SPEC", cluster_name), _CLUSTERS] = None,
    tokens: Annotated[str | float | None, Form("D")] = None,
    *,
    hours: Annotated[float | None, Form("H")] = None,
    money: Annotated[float | None, Form("M")] = None,
    devices: given.Count = 1,
    recipes: Annotated[Sequence[str], given.NAMES] = (),
    price: Annotated[str | None, Form("P")] = None,
    sequence_length: given.Count | None = None,
    batch_size: given.Count | None = None,
    data: given.Source | Path | None = None,
    show: given.Progress | None = None,
) -> Advice:
    """Find the best recipe, layout and settings for a machine and a budget.

        narrowgauge advise --model gpt2-124m --cluster rtx4090
        narrowgauge advise --model llama3-8b --cluster b200 --devices 8 --tokens 100B

    The best takes the fewest device-hours for the loss that bf16 reaches: days by `plan`, times the tokens
    that buy the gap of `predict` back.

    Args:
        model: A named model (narrowgauge models).
        cluster: A shipped cluster, or a .toml file; None for this machine.
        tokens: Tokens to train on, as in 10B (as published, or those that hours or money pay for).
        hours: The most hours of the training.
        money: The most money, in the currency of the price.
        devices: Devices in all.
        recipes: Recipes to choose from (those that the machine multiplies natively).
        price: The price of a device-hour, as in 2.50USD (the cluster's).
        sequence_length: Tokens of a sequence (as published).
        batch_size: Sequences of a step (as published).
        data: The text or corpus that the lines name.
        show: Called with the name of each recipe and layout, their number so far and in all.

    Returns:
        At most three answers; `refused` holds the reason if there is none.

    Raises:
        UserError: A name or value is wrong.
    """
    from narrowgauge.trainer.laboratory.advise.search import Question, defaults, machine_of

    require("recipes", recipes, Iterable)
    machine, name = machine_of(cluster)
    for option, value in (("hours", hours), ("money", money), ("devices", devices)):
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise UserError(f"{option} = {value!r}: it must be above 0")
    if devices > (whole := machine.devices_per_node) and devices % whole:
        raise UserError(
            f"devices = {devices}: a node of this cluster has {whole}, and a run takes whole nodes; take "
            f"{devices // whole * whole}"
        )
    hour = parse_price("--price", str(price)) if price else machine.price
    limit, refused = hours or math.inf, ""
    if money is not None and hour is None:
        refused = "money needs the price of a device-hour, which this cluster's file lacks; add --price, as "
        refused += "2.50USD"
    elif money is not None and hour is not None:
        limit = min(limit, money / hour.amount / devices)
    budget: float | None = None if tokens is None else tokens_of(str(tokens))
    if (found := published(model)) and budget is None and hours is None and money is None:
        budget = found.tokens
    if budget is None and limit == math.inf and not refused:
        refused = "a budget is missing, and no published training of this model gives one; add --tokens, "
        refused += "--hours or --money"
    text = None if data is None else str(data)
    values, notes = defaults(model, text, sequence_length, batch_size)
    if refused:
        return Advice([], refused, notes=notes)
    question = Question(values, notes, machine, name, devices, budget, limit, hour, text)
    return question.advice(recipes, show)
