"""`search`: the recipe that costs a trained model least under a budget, by costs that forks measure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

from narrowgauge.quantization import Cast
from narrowgauge.recipes import GEMM_PLACES, GEMMS, load_recipe, matches
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.system.result import Result, Row
from narrowgauge.trainer import analysis  # each name is imported when it is used, and with it torch
from narrowgauge.trainer.laboratory import arguments as given
from narrowgauge.trainer.laboratory.chart import bars
from narrowgauge.trainer.laboratory.subject import FEW, heading, operand_cast

WIDE = "bf16"
HEAD = "head"


class SearchResult(Result):
    """The recipe of a search, and the baselines that it is compared with.

    Attributes:
        path: The recipe's file; the baselines' are in the folder of its name without the ending.
        recipe: The recipe.
        answer: Amount, cost and baselines, as JSON values.
        heading: The model, and the text it was measured on.
    """

    def __init__(self, path: Path, answer: Mapping[str, Any], heading: str) -> None:
        """Keep what was found."""
        self.path, self.recipe, self.answer = path, load_recipe(path), dict(answer)
        self.heading = heading

    def __repr__(self) -> str:
        cost = f"predicted cost {self.answer['predicted_cost']:.3g} nats"
        return f"<SearchResult {self.path}: {self.answer['amount']:.3f} {self.answer['unit']}, {cost}>"

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

    def table(self) -> str:
        """The model, the result in a line, and the line that trains what was found and the baselines."""
        return "\n".join((self.heading, _words(self.answer), f"compare them: {self.answer['compare']}"))

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
    fork_steps: given.Count = 20,
    fork_seeds: given.Count = 3,
    show: given.Progress | None = None,
    **text: Unpack[given.Text],
) -> SearchResult:
    """Find the cheapest recipe for a run, with a share of its FLOPs in 4 bits.

        narrowgauge search runs/mine --formats mxfp4,mxfp8,bf16 --budget 0.5 --out found.toml

    The cost of each GEMM in each format is measured by training: forks of the run's newest checkpoint, with
    and without it (`analysis.forks`).

    Args:
        run: A run directory.
        formats: The casts to choose from, such as mxfp4,mxfp8,bf16.
        budget: The least share of the FLOPs in at most 4 bits.
        out: The recipe's file, which is written; the baselines' go into a folder of its name.
        keep: Layers that stay in the widest format, '' for none.
        fork_steps: The optimizer steps of a fork.
        fork_seeds: Repeats of each fork, in another order of the text.
        show: Called with a name, what is done and how much there is.
        text: The text and the device: data, batches, batch_size, sequence_length, tokenizer, device.

    Returns:
        The recipe, its predicted cost, and its baselines.

    Raises:
        UserError: No recipe meets the budget, a name is unknown, or the run has no checkpoint to fork from.
    """
    casts, path, file = _casts(formats), Path(run), Path(out)
    forks, limit = analysis.Forks(fork_steps, fork_seeds), analysis.flops_budget(casts, budget)
    if file.suffix != ".toml":
        raise UserError(f"--out {file} is the file of a recipe, which ends in .toml; add the ending")
    if file.stem in (WIDE, *analysis.BASELINES):
        raise UserError(f"--out {file}: another recipe that it is compared with has this name; take another")
    probed = analysis.open_probed(run, **(FEW | text))
    weights = _weights(probed)
    kept = _kept(keep, list(weights))
    try:
        make_directory(file.with_suffix(""))  # before minutes of forks
    except OSError as error:
        raise UserError(f"--out {file} cannot be written: {error.strerror}; name another file") from None
    choices = analysis.choices_of(casts, weights, _gaps(forks, probed, casts, show), kept)
    source = (
        f"narrowgauge search {run} --formats {','.join(formats)} {limit.option} "
        f"--fork-steps {forks.steps} --fork-seeds {forks.seeds}"
    )
    answer = _answer(path, file, choices, limit, probed, source)
    return SearchResult(file, answer, heading(path, probed))


def _answer(
    run: Path,
    file: Path,
    choices: analysis.Choices,
    limit: analysis.Budget,
    probed: analysis.Probed,
    source: str,
) -> dict[str, Any]:
    """Solve, and write the files of the answer and its baselines; their figures."""
    found = analysis.solve(choices, limit)
    errors = analysis.relative_errors(probed.subject, choices.casts[choices.narrowest])
    others = analysis.baselines(
        choices, limit, errors, _blocks(_weights(probed)), probed.subject.position.seed
    )
    title = f"{choices.amount(found, limit):.3f} {limit.words}, at least predicted cost"
    folder = file.with_suffix("")
    write_whole(file, analysis.recipe_text(found, file.stem, title, source))
    for name, other in others.items():
        about = f"baseline of {file.stem}"
        write_whole(folder / f"{name}.toml", analysis.recipe_text(other, name, about, source))
    recipes = ",".join([WIDE, str(file), *(str(folder / f"{name}.toml") for name in others)])
    return {
        "recipe": str(file),
        "budget": limit.option,
        "unit": limit.words,
        "kept": list(dict.fromkeys(layer for layer, _ in choices.shares if (layer, "fprop") in choices.kept)),
        **_figures(choices, found, limit),
        "baselines": {name: _figures(choices, other, limit) for name, other in others.items()},
        "compare": shlex.join(
            ["narrowgauge", "compare", str(run / "config.toml"), "--recipes", recipes, "--seeds", "3"]
        ),
    }


def _gaps(
    forks: analysis.Forks, probed: analysis.Probed, casts: Mapping[str, Cast], show: given.Progress | None
) -> dict[tuple[analysis.Gemm, str], dict[int, float]]:
    """The gap of each GEMM in each format by seed, in nats; 0 for the format of the fork without a change."""
    recipe = probed.trained.config.spec.recipe
    changes = {
        ((layer, gemm), name): analysis.only_in(
            recipe, layer, {p: cast for p in GEMM_PLACES if p.startswith(gemm)}
        )
        for layer in probed.layers
        for gemm in GEMMS
        for name, cast in casts.items()
    }
    tried = {key: change for key, change in changes.items() if casts[key[1]].name != recipe.compute}
    gaps = forks.gaps(probed, tried, show)
    return {key: gaps.get(key) or dict.fromkeys(range(1, forks.seeds + 1), 0.0) for key in changes}


def _figures(
    choices: analysis.Choices, assignment: analysis.Assignment, budget: analysis.Budget
) -> dict[str, Any]:
    """An assignment's use of the budget, and its predicted cost, with the interval of its forks."""
    return {
        "amount": choices.amount(assignment, budget),
        "predicted_cost": choices.cost(assignment),
        "measured": choices.measured(assignment).as_json(),
    }


def _words(answer: Mapping[str, Any]) -> str:
    """The result and the baselines, in a line."""
    compared = [
        f"{name} {other['predicted_cost']:.3g} at {other['amount']:.3f}"
        for name, other in answer["baselines"].items()
    ]
    amount = f"{answer['recipe']}: {answer['amount']:.3f} {answer['unit']}"
    cost = f"predicted cost {answer['predicted_cost']:.3g} nats"
    measured = answer["measured"]
    ends = (measured["low"], measured["high"])
    last = "its forks' gaps add up to " + (
        f"{measured['mean']:.3g} nats" if None in ends else "{:.3g} .. {:.3g} nats (95 %)".format(*ends)
    )
    return f"{amount}, {cost}; {', '.join(compared)}; {last}"


def _casts(formats: Sequence[str]) -> dict[str, Cast]:
    """The casts to choose from, by name."""
    if isinstance(formats, str) or not isinstance(formats, Sequence):
        raise UserError(f"formats = {formats!r}: they are casts in a list, as in ['mxfp4', 'bf16']")
    if not formats:
        raise UserError("--formats is empty, but a search needs casts to choose from, as in mxfp4,bf16")
    return {name: operand_cast(name) for name in formats}


def _kept(patterns: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The patterns of layers that stay wide."""
    for pattern in patterns:
        if not any(matches(layer, pattern) for layer in layers):
            names = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
            raise UserError(
                f"--keep {pattern}: no layer has this name; take one of {names}, or one such as {layers[0]}"
            )
    return list(patterns)


def _weights(probed: analysis.Probed) -> dict[str, int]:
    """The number of elements of each linear layer's weight."""
    parameters = dict(probed.trained.model.named_parameters(remove_duplicate=False))
    return {name: parameters[f"{name}.weight"].numel() for name in probed.layers}


def _blocks(weights: Mapping[str, int]) -> dict[str, int | None]:
    """The index of each layer's block; None for the head."""
    words = {name: name.split(".") for name in weights}
    return {name: int(w[1]) if w[0] == "blocks" else None for name, w in words.items()}
