"""`search`: finds the recipe with the smallest predicted cost under a budget."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from narrowgauge.analysis import (
    BASELINES,
    Assignment,
    Budget,
    Choices,
    Probed,
    backward_costs,
    baselines,
    bits_budget,
    choices_of,
    flops_budget,
    forward_costs,
    pace,
    recipe_text,
    relative_errors,
    require_solver,
    solve,
    step_metric,
    time_budget,
)
from narrowgauge.cli.verbs.analysis import heading, open_subject, operand_cast, progress
from narrowgauge.cluster import load_cluster
from narrowgauge.errors import UserError
from narrowgauge.experiment.design import make_comparison
from narrowgauge.experiment.grid import RECIPE, Variant
from narrowgauge.experiment.run import train_runs
from narrowgauge.files import make_directory, write_whole
from narrowgauge.quantization import Cast
from narrowgauge.recipes import load_recipe, matches
from narrowgauge.report import print_comparison, read_run, read_runs, write_report
from narrowgauge.report.table.sentence import summary
from narrowgauge.report.verdict.groups import groups
from narrowgauge.runs.run_directory import RunDirectory

WIDE = "bf16"


def run(options: argparse.Namespace) -> None:
    """Search, write the recipe, and with --check train it along with its baselines."""
    casts = _casts(options.formats)
    require_solver()
    budget = _budget(options, casts)
    _require_name(options)
    console = Console(stderr=options.json)
    with progress(console, "search") as show:
        probed = open_subject(options)
        per_e_fold = _pace(options)
        metric = step_metric(probed.trained)
        costs = {
            name: [
                *forward_costs(probed.subject, cast, lambda _, *n, name=name: show(f"{name} forward", *n)),
                *backward_costs(
                    probed.subject, cast, metric, lambda _, *n, name=name: show(f"{name} backward", *n)
                ),
            ]
            for name, cast in casts.items()
        }
    weights = _weights(probed)
    choices = choices_of(casts, weights, costs, _kept(options.keep, list(weights)), per_e_fold)
    found = solve(choices, budget)
    given = options.loss_per_doubling
    weight = "" if given is None else f" --loss-per-doubling {given}"
    source = f"narrowgauge search {options.run} --formats {options.formats} {budget.option}{weight}"
    title = f"{choices.amount(found, budget):.3f} {budget.words}, at least predicted cost"
    text = recipe_text(found, options.out.stem, title, source)
    make_directory(options.out.parent)
    write_whole(options.out, text)
    load_recipe(options.out)
    errors = relative_errors(probed.subject, casts[choices.narrowest])
    others = baselines(choices, budget, errors, _blocks(weights), probed.subject.position.seed)
    answer = {
        "recipe": str(options.out),
        "budget": budget.option,
        "unit": budget.words,
        "loss_per_doubling": per_e_fold * math.log(2),
        "kept": list(dict.fromkeys(layer for layer, _ in choices.shares if (layer, "fprop") in choices.kept)),
        **_figures(choices, found, budget),
        "baselines": {name: _figures(choices, other, budget) for name, other in others.items()},
    }
    console.print(heading(options.run, probed), markup=False, highlight=False, soft_wrap=True)
    console.print(_words(answer), markup=False, highlight=False, soft_wrap=True)
    if options.check:
        about = f"baseline of {options.out.stem}"
        texts = {name: recipe_text(other, name, about, source) for name, other in others.items()}
        _check(options, probed, {options.out.stem: text, **texts}, console)
    if options.json:
        print(json.dumps(answer, indent=1))


def _figures(choices: Choices, assignment: Assignment, budget: Budget) -> dict[str, float]:
    """The amount of the budget that an assignment uses, and its predicted cost."""
    return {"amount": choices.amount(assignment, budget), "predicted_cost": choices.cost(assignment)}


def _words(answer: Mapping[str, Any]) -> str:
    """The result or a baseline, in a line."""
    compared = [
        f"{name} {other['predicted_cost']:.3g} at {other['amount']:.3f}"
        for name, other in answer["baselines"].items()
    ]
    amount = f"{answer['recipe']}: {answer['amount']:.3f} {answer['unit']}"
    cost = f"predicted cost {answer['predicted_cost']:.3g} nats"
    doubling = f"a doubling of the steps removes {answer['loss_per_doubling']:.3g} nats"
    return f"{amount}, {cost}; {', '.join(compared)}; {doubling}"


def _require_name(options: argparse.Namespace) -> None:
    """Check --out, before anything is measured.

    Raises:
        UserError: It is not a recipe file, or has the name of a recipe that --check trains as well.
    """
    if options.out.suffix != ".toml":
        raise UserError(f"--out {options.out} is the file of a recipe, which ends in .toml; add the ending")
    if options.check and options.out.stem in (WIDE, *BASELINES):
        raise UserError(f"--out {options.out}: --check trains another recipe of this name; take another")


def _pace(options: argparse.Namespace) -> float:
    """The nats that the model's training removes while its steps grow by a factor of e.

    Raises:
        UserError: A model of another program has no losses of its training, and the option is missing.
    """
    if options.loss_per_doubling is not None:
        if not 0 <= options.loss_per_doubling < math.inf:
            raise UserError(f"--loss-per-doubling {options.loss_per_doubling} must be nats of 0 or more")
        return float(options.loss_per_doubling) / math.log(2)
    run = read_run(options.run) if RunDirectory(options.run).metrics.is_file() else None
    found = pace({step.step: step.loss for step in run.steps}) if run else None
    if found is None:
        raise UserError(
            f"{options.run} has no losses of its training, by which search weighs lost progress of steps "
            "against loss; give the nats that twice the steps would remove, as in --loss-per-doubling 0.1"
        )
    return found


def _kept(text: str, layers: Sequence[str]) -> list[str]:
    """The patterns of --keep.

    Raises:
        UserError: One fits no layer.
    """
    patterns = [pattern.strip() for pattern in text.split(",") if pattern.strip()]
    for pattern in patterns:
        if not any(matches(layer, pattern) for layer in layers):
            names = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
            raise UserError(
                f"--keep {pattern}: no layer has this name; take one of {names}, or one such as {layers[0]}"
            )
    return patterns


def _budget(options: argparse.Namespace, casts: Mapping[str, Cast]) -> Budget:
    """The requested budget.

    Raises:
        UserError: It is out of reach, or time was asked for without a cluster.
    """
    if (options.gemm_time is None) != (options.cluster is None):
        raise UserError("--gemm-time and --cluster belong together, as in --gemm-time 0.5 --cluster b200")
    if options.effective_bits is not None:
        return bits_budget(casts, options.effective_bits)
    if options.gemm_time is not None:
        cluster = load_cluster(options.cluster)
        formats = {
            n: cluster.narrow_format(c.element.bits) if c.is_scaled else cluster.format_for(n)
            for n, c in casts.items()
        }
        speeds = {name: cluster.speed(found or cluster.format_for("bf16")) for name, found in formats.items()}
        return time_budget(casts, options.gemm_time, speeds, options.cluster)
    return flops_budget(casts, options.budget)


def _check(options: argparse.Namespace, probed: Probed, recipes: Mapping[str, str], console: Console) -> None:
    """Train bf16 and the recipes, paired by seed, in the folder named after --out; print the verdicts.

    Each recipe is compared with bf16; then each baseline with the result of the search, the first recipe.
    """
    folder = options.out.with_suffix("")
    make_directory(folder)
    variants = [Variant(WIDE, {RECIPE: WIDE})]
    for name, text in recipes.items():
        path = folder / f"{name}.recipe.toml"
        write_whole(path, text)
        variants.append(Variant(name, {RECIPE: str(path)}))
    values = probed.trained.config.model_dump()
    values["recipe"] = {"backend": probed.trained.config.recipe.backend}
    if options.steps:
        values["training"]["steps"] = options.steps
    experiment = make_comparison(values, variants, {}, options.seeds)
    train_runs(experiment, folder, console)
    paths = [folder / run.name for run in experiment.runs]
    report = write_report(paths, folder / "report.html")
    runs = read_runs(paths)
    print_comparison(runs, console)
    _, found, *others = (list(group.runs.values()) for group in groups(runs))
    beside = " ".join(summary([*found, *(run for other in others for run in other)]))
    console.print(
        f"\nThe result of the search and its baselines: {beside}",
        style="bold",
        markup=False,
        highlight=False,
    )
    console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)


def _casts(text: str) -> dict[str, Cast]:
    """The casts of --formats by name, in their order."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError("--formats is empty, but a search needs casts to choose from, as in mxfp4,bf16")
    return {name: operand_cast(name) for name in names}


def _weights(probed: Probed) -> dict[str, int]:
    """The number of elements of each linear layer's weight."""
    parameters = dict(probed.trained.model.named_parameters(remove_duplicate=False))
    return {name: parameters[f"{name}.weight"].numel() for name in probed.layers}


def _blocks(weights: Mapping[str, int]) -> dict[str, int | None]:
    """The index of each layer's block; None for the head."""
    words = {name: name.split(".") for name in weights}
    return {name: int(w[1]) if w[0] == "blocks" else None for name, w in words.items()}
