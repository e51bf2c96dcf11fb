"""`search`: the recipe with the smallest predicted cost under a budget, for a trained model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from narrowgauge import analysis, report  # each name is imported when it is used, and with it torch
from narrowgauge.errors import UserError, checked
from narrowgauge.files import make_directory, write_whole
from narrowgauge.laboratory import arguments as given
from narrowgauge.laboratory.chart import bars
from narrowgauge.laboratory.subject import FEW, heading, open_subject, operand_cast
from narrowgauge.quantization import Cast
from narrowgauge.recipes import GEMM_PLACES, GEMMS, load_recipe, matches
from narrowgauge.result import Result, Row

if TYPE_CHECKING:
    from rich.console import Console

WIDE = "bf16"
HEAD = "head"


class Found(Result):
    """The recipe of a search, and the baselines that it is compared with.

    Attributes:
        path: The recipe's file.
        recipe: The recipe.
        answer: Amount, predicted cost and baselines, as JSON values.
        heading: The model, and the text it was measured on.
        texts: The recipes of the answer and of the baselines as TOML, by name, the answer first.
        runs: With `check`, the runs of bf16, the answer and the baselines; else none.
    """

    def __init__(
        self,
        path: Path,
        answer: Mapping[str, Any],
        heading: str,
        texts: Mapping[str, str],
        runs: Sequence[report.Run],
    ) -> None:
        """Keep what was found."""
        self.path, self.recipe, self.answer = path, load_recipe(path), dict(answer)
        self.heading, self.texts, self.runs = heading, dict(texts), list(runs)

    def __repr__(self) -> str:
        cost = f"predicted cost {self.answer['predicted_cost']:.3g} nats"
        return f"<Found {self.path}: {self.answer['amount']:.3f} {self.answer['unit']}, {cost}>"

    def rows(self) -> list[Row]:
        """A row for the answer and each baseline: amount of the budget, and predicted cost in nats."""
        found = {self.recipe.name: self.answer, **self.answer["baselines"]}
        return [
            {"recipe": name, "amount": one["amount"], "predicted_cost": one["predicted_cost"]}
            for name, one in found.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """The answer and its baselines."""
        return self.answer

    def show(self, console: Console) -> None:
        """Print the model and the result in two lines; with `check`, the verdicts."""
        for line in (self.heading, _words(self.answer)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self.runs:
            self._show_check(console)

    def _show_check(self, console: Console) -> None:
        """Print the verdicts against bf16, then the baselines' against the answer."""
        from narrowgauge.report.verdict.groups import groups

        report.print_comparison(self.runs, console)
        _, found, *others = (list(group.runs.values()) for group in groups(self.runs))
        beside = " ".join(report.summary([*found, *(run for other in others for run in other)]))
        line = f"\nThe result of the search and its baselines: {beside}"
        console.print(line, style="bold", markup=False, highlight=False)
        page = self.path.with_suffix("") / "report.html"
        console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)

    def plot(self) -> str:
        """The predicted cost of the answer and of each baseline."""
        values = {row["recipe"]: (row["predicted_cost"],) * 3 for row in self.rows()}
        return bars(values, "predicted cost, nats")


@checked
def search(
    run: given.Run | str,
    formats: given.Names | list[str],
    budget: Annotated[float, given.Form("X")],
    out: given.File | str = Path("found.toml"),
    *,
    keep: given.Names | list[str] = (HEAD,),
    loss_per_doubling: Annotated[float | None, given.Form("NATS")] = None,
    fork_steps: given.Count | None = None,
    fork_seeds: given.Count = 3,
    check: bool = False,
    seeds: given.Seeds = 3,
    steps: given.Count | None = None,
    show: given.Progress | None = None,
    console: Any = None,
    **text: Unpack[given.Text],
) -> Found:
    """Find the cheapest recipe for a model, with a share of its FLOPs in 4 bits.

        narrowgauge search runs/mine --formats mxfp4,mxfp8,bf16 --budget 0.5 --out found.toml

    Args:
        run: A run directory, a Hugging Face folder, or an llm.c model.
        formats: The casts to choose from, such as mxfp4,mxfp8,bf16.
        budget: The least share of the FLOPs in at most 4 bits.
        out: The recipe's file, which is written.
        keep: Layers that stay in the widest format, '' for none.
        loss_per_doubling: Nats that twice the steps would remove from the loss (the run's own).
        fork_steps: Measure the cost of each GEMM by training, in forks of this length from the checkpoint.
        fork_seeds: Repeats of each fork, in another order of the text.
        check: Train the answer along with bf16 and four baselines.
        seeds: With check, how many seeds of each, or which.
        steps: With check, the optimizer steps (the run's).
        show: Called with a name, what is done and how much there is.
        console: A rich console for the progress of `check`; None for the standard output.
        text: The text and the device: data, batches, batch_size, sequence_length, tokenizer, device.

    Returns:
        The recipe, its predicted cost, and its baselines.

    Raises:
        UserError: The budget is out of reach, a name is unknown, or scipy is missing.
    """
    casts, path, file, show = _casts(formats), Path(run), Path(out), show or (lambda *_: None)
    analysis.require_solver()
    forks = None if fork_steps is None else analysis.Forks(fork_steps, fork_seeds)
    limit = analysis.flops_budget(casts, budget)
    _require_name(file, check)
    probed = open_subject(run, **(FEW | text))
    weights, gaps = _weights(probed), {}
    if forks is None:
        per_e_fold = _pace(path, loss_per_doubling)
        costs = analysis.gemm_costs(_costs(probed, casts, show), per_e_fold)
    else:
        gaps = _gaps(forks, probed, casts, show)
        costs = {g: {n: statistics.fmean(gaps[g, n].values()) for n in casts} for g, _ in gaps}
    choices = analysis.choices_of(casts, weights, costs, _kept(keep, list(weights)), gaps)
    weight = "" if loss_per_doubling is None else f" --loss-per-doubling {loss_per_doubling}"
    weight += "" if forks is None else f" --fork-steps {forks.steps} --fork-seeds {forks.seeds}"
    source = f"narrowgauge search {run} --formats {','.join(formats)} {limit.option}{weight}"
    answer, texts = _answer(file, choices, limit, probed, source)
    if forks is None:
        answer["loss_per_doubling"] = per_e_fold * math.log(2)
    result = Found(file, answer, heading(path, probed), texts, ())
    if check:
        result.runs = _check(result, probed, seeds, steps, console)
    return result


def _answer(
    file: Path, choices: analysis.Choices, limit: analysis.Budget, probed: analysis.Probed, source: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Solve, and write the recipe's file; the figures and recipes of the answer and its baselines."""
    found = analysis.solve(choices, limit)
    title = f"{choices.amount(found, limit):.3f} {limit.words}, at least predicted cost"
    texts = {file.stem: analysis.recipe_text(found, file.stem, title, source)}
    make_directory(file.parent)
    write_whole(file, texts[file.stem])
    errors = analysis.relative_errors(probed.subject, choices.casts[choices.narrowest])
    others = analysis.baselines(
        choices, limit, errors, _blocks(_weights(probed)), probed.subject.position.seed
    )
    about = f"baseline of {file.stem}"
    texts |= {name: analysis.recipe_text(other, name, about, source) for name, other in others.items()}
    answer = {
        "recipe": str(file),
        "budget": limit.option,
        "unit": limit.words,
        "kept": list(dict.fromkeys(layer for layer, _ in choices.shares if (layer, "fprop") in choices.kept)),
        **_figures(choices, found, limit),
        "baselines": {name: _figures(choices, other, limit) for name, other in others.items()},
    }
    return answer, texts


def _costs(probed: analysis.Probed, casts: Mapping[str, Cast], show: given.Progress) -> dict[str, list[Any]]:
    """The cost of each place in each format."""
    metric = analysis.step_metric(probed.trained)
    return {
        name: [
            *analysis.forward_costs(
                probed.subject, cast, lambda _, *n, name=name: show(f"{name} forward", *n)
            ),
            *analysis.backward_costs(
                probed.subject, cast, metric, lambda _, *n, name=name: show(f"{name} backward", *n)
            ),
        ]
        for name, cast in casts.items()
    }


def _gaps(
    forks: analysis.Forks, probed: analysis.Probed, casts: Mapping[str, Cast], show: given.Progress
) -> dict[tuple[analysis.Gemm, str], dict[int, float]]:
    """The gap of each GEMM in each format by seed, in nats; 0 for the format of the fork without a change."""
    recipe = probed.trained.config.spec.recipe
    changes = {
        ((layer, gemm), name): analysis.alone(
            recipe, layer, {p: cast for p in GEMM_PLACES if p.startswith(gemm)}
        )
        for layer in probed.layers
        for gemm in GEMMS
        for name, cast in casts.items()
    }
    tried = {key: change for key, change in changes.items() if casts[key[1]].name != recipe.compute}
    gaps = forks.gaps(probed, tried, lambda *done: show("forks", *done))
    return {key: gaps.get(key) or dict.fromkeys(range(1, forks.seeds + 1), 0.0) for key in changes}


def _figures(
    choices: analysis.Choices, assignment: analysis.Assignment, budget: analysis.Budget
) -> dict[str, Any]:
    """An assignment's use of the budget, and its predicted cost, with an interval if forks measured it."""
    figures: dict[str, Any] = {"amount": choices.amount(assignment, budget)}
    figures["predicted_cost"] = choices.cost(assignment)
    if (measured := choices.measured(assignment)) is not None:
        figures["measured"] = measured.as_json()
    return figures


def _words(answer: Mapping[str, Any]) -> str:
    """The result and the baselines, in a line."""
    compared = [
        f"{name} {other['predicted_cost']:.3g} at {other['amount']:.3f}"
        for name, other in answer["baselines"].items()
    ]
    amount = f"{answer['recipe']}: {answer['amount']:.3f} {answer['unit']}"
    cost = f"predicted cost {answer['predicted_cost']:.3g} nats"
    if (measured := answer.get("measured")) is None:
        last = f"a doubling of the steps removes {answer['loss_per_doubling']:.3g} nats"
    else:
        ends = (measured["low"], measured["high"])
        last = "its forks' gaps add up to " + (
            f"{measured['mean']:.3g} nats" if None in ends else "{:.3g} .. {:.3g} nats (95 %)".format(*ends)
        )
    return f"{amount}, {cost}; {', '.join(compared)}; {last}"


def _require_name(out: Path, check: bool) -> None:
    """Check the file's name, before anything is measured.

    Raises:
        UserError: It is not a recipe file, or has the name of a recipe that `check` trains as well.
    """
    if out.suffix != ".toml":
        raise UserError(f"--out {out} is the file of a recipe, which ends in .toml; add the ending")
    if check and out.stem in (WIDE, *analysis.BASELINES):
        raise UserError(f"--out {out}: --check trains another recipe of this name; take another")


def _pace(path: Path, nats: float | None) -> float:
    """The nats that the model's training removes while its steps grow by a factor of e.

    Raises:
        UserError: A model of another program has no losses of its training, and none are given.
    """
    from narrowgauge.runs.run_directory import RunDirectory

    if nats is not None:
        if not 0 <= nats < math.inf:
            raise UserError(f"--loss-per-doubling {nats} must be nats of 0 or more")
        return float(nats) / math.log(2)
    run = report.read_run(path) if RunDirectory(path).metrics.is_file() else None
    found = analysis.pace({step.step: step.loss for step in run.steps}) if run else None
    if found is None:
        raise UserError(
            f"{path} has no losses of its training, by which search weighs lost progress of steps "
            "against loss; give the nats that twice the steps would remove, as in --loss-per-doubling 0.1"
        )
    return found


def _casts(formats: Sequence[str]) -> dict[str, Cast]:
    """The casts to choose from, by name."""
    if isinstance(formats, str) or not isinstance(formats, Sequence):
        raise UserError(f"formats = {formats!r}: they are casts in a list, as in ['mxfp4', 'bf16']")
    if not formats:
        raise UserError("--formats is empty, but a search needs casts to choose from, as in mxfp4,bf16")
    return {name: operand_cast(name) for name in formats}


def _kept(patterns: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The patterns of layers that stay wide.

    Raises:
        UserError: One fits no layer.
    """
    for pattern in patterns:
        if not any(matches(layer, pattern) for layer in layers):
            names = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
            raise UserError(
                f"--keep {pattern}: no layer has this name; take one of {names}, or one such as {layers[0]}"
            )
    return list(patterns)


def _check(
    found: Found, probed: analysis.Probed, seeds: given.Seeds, steps: int | None, console: Console | None
) -> list[report.Run]:
    """Train bf16 and the recipes, paired by seed, in the folder named after the answer; returns the runs.

    Each recipe is compared with bf16; then each baseline with the result of the search, the first recipe.
    """
    from rich.console import Console

    from narrowgauge.experiment.design import make_comparison
    from narrowgauge.experiment.grid import RECIPE, Variant
    from narrowgauge.experiment.run import train_runs

    folder = found.path.with_suffix("")
    make_directory(folder)
    variants = [Variant(WIDE, {RECIPE: WIDE})]
    for name, text in found.texts.items():
        path = folder / f"{name}.recipe.toml"
        write_whole(path, text)
        variants.append(Variant(name, {RECIPE: str(path)}))
    values = probed.trained.config.model_dump()
    values["recipe"] = {"backend": probed.trained.config.recipe.backend}
    if steps:
        values["training"]["steps"] = steps
    experiment = make_comparison(values, variants, seeds)
    train_runs(experiment, folder, console or Console())
    paths = [folder / run.name for run in experiment.runs]
    report.write_report(paths, folder / "report.html")
    return report.read_runs(paths)


def _weights(probed: analysis.Probed) -> dict[str, int]:
    """The number of elements of each linear layer's weight."""
    parameters = dict(probed.trained.model.named_parameters(remove_duplicate=False))
    return {name: parameters[f"{name}.weight"].numel() for name in probed.layers}


def _blocks(weights: Mapping[str, int]) -> dict[str, int | None]:
    """The index of each layer's block; None for the head."""
    words = {name: name.split(".") for name in weights}
    return {name: int(w[1]) if w[0] == "blocks" else None for name, w in words.items()}
