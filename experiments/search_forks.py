"""What `search` rests on, measured in forks of one bf16 run: costs of GEMMs, and recipes (`analysis.forks`).

    python experiments/search_forks.py gemms RUN --steps 10 --seeds 1,2,3
    python experiments/search_forks.py recipes RUN
    python experiments/search_forks.py arms RUN --steps 10 --seeds 1,2,3
    python experiments/search_forks.py page

RUN has the model, text and schedule of experiments/ladder2/stages.toml, and stopped early. `gemms` measures
each GEMM in MXFP4 alone, and the head's wgrad in parts; `recipes` writes the recipes of `search` by its
predictions (`found`), by these costs (`forks`) and of its baselines; `arms` trains each. A row is written
when its fork is done and not made again, so the same line continues after a stop. `page` makes the tables of
docs/results.md.
"""

import argparse
import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import narrowgauge as ng
from narrowgauge.analysis import (
    Forks,
    Probed,
    alone,
    choices_of,
    flops_budget,
    open_probed,
    recipe_text,
    solve,
)
from narrowgauge.analysis.forks import wide
from narrowgauge.files import write_whole
from narrowgauge.quantization import cast, make_cast
from narrowgauge.recipes import GEMM_PLACES, GEMMS, Recipe, load_recipe
from publish.search import COLUMNS, WIDE, Fork, markdown_of, read_forks

ROOT = Path(__file__).parents[1]
ROWS, RECIPES = ROOT / "docs" / "evidence" / "search", ROOT / "experiments" / "recipes" / "search"
PAGE = ROOT / "docs" / "results.md"
NARROW, BUDGETS, BATCHES = "mxfp4", (0.5, 0.75), 4
NAMES = ("found", "forks", "keep-ends", "smallest-error", "random")


def main() -> None:
    """Run one of the four parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=("gemms", "recipes", "arms", "page"))
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", default="1")
    options = parser.parse_args()
    if options.part == "page":
        write_page()
        return
    torch.set_num_threads(1)
    probed = open_probed(options.run, "cpu", batches=BATCHES)
    if options.part == "recipes":
        write_recipes(options.run, probed)
        return
    changes = gemm_changes(probed) if options.part == "gemms" else arm_changes()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    measure(ROWS / f"{options.part}.csv", probed, changes, options.steps, seeds)


def gemm_changes(probed: Probed) -> dict[str, Recipe]:
    """Each GEMM in the narrow format, the head first, and the operands of the head's wgrad."""
    own, narrow = probed.trained.config.spec.recipe, cast(NARROW)
    changes = {
        f"{layer}.{gemm}": alone(own, layer, {p: narrow for p in GEMM_PLACES if p.startswith(gemm)})
        for layer in reversed(probed.layers)
        for gemm in GEMMS
    }
    unbiased = make_cast({"cast": NARROW, "rounding": "stochastic"})
    parts = {"dy": ("dy", narrow), "x": ("x", narrow), "dy-stochastic": ("dy", unbiased)}
    for name, (operand, of) in parts.items():
        changes[f"head.wgrad.{name}"] = alone(own, "head", {f"wgrad.{operand}": of})
    return changes


def arm_changes() -> dict[str, Recipe]:
    """The recipes that are written."""
    names = ["uniform", *(f"{budget * 100:.0f}-{name}" for budget in BUDGETS for name in NAMES)]
    paths = {name: RECIPES / f"{name}.toml" for name in names}
    return {name: load_recipe(path) for name, path in paths.items() if path.exists()}


def measure(
    file: Path, probed: Probed, changes: Mapping[str, Recipe], steps: int, seeds: Sequence[int]
) -> None:
    """Make the forks that have no row yet, seed after seed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    start, forks = probed.trained.step, Forks(steps)
    known = {(f.change, f.seed, f.start, f.steps) for f in read_forks(file)}
    if not file.exists():
        write_whole(file, ",".join(COLUMNS) + "\n")
    for seed in seeds:
        for change, recipe in {WIDE: wide(probed.trained.config.spec.recipe), **changes}.items():
            if (change, seed, start, steps) not in known:
                loss = forks.loss(probed, recipe, seed)
                with file.open("a", encoding="utf-8", newline="") as lines:
                    csv.writer(lines, lineterminator="\n").writerow(
                        (change, seed, start, steps, f"{loss:.7f}")
                    )


def write_recipes(run: Path, probed: Probed) -> None:
    """Search by predictions, and by the rows of `gemms`."""
    RECIPES.mkdir(parents=True, exist_ok=True)
    for budget in BUDGETS:
        prefix = f"{budget * 100:.0f}"
        found = ng.search(run, [NARROW, WIDE], budget, RECIPES / f"{prefix}-found.toml", keep=())
        for name, text in found.texts.items():
            if name in NAMES:
                write_whole(RECIPES / f"{prefix}-{name}.toml", text)
        write_whole(RECIPES / "uniform.toml", found.texts["uniform"])
        text = forks_text(read_forks(ROWS / "gemms.csv"), probed, budget, f"{prefix}-forks")
        write_whole(RECIPES / f"{prefix}-forks.toml", text)


def forks_text(rows: Sequence[Fork], probed: Probed, budget: float, name: str) -> str:
    """The recipe of least cost by measured gaps."""
    casts = {n: cast(n) for n in (NARROW, WIDE)}
    parameters = dict(probed.trained.model.named_parameters(remove_duplicate=False))
    weights = {layer: parameters[f"{layer}.weight"].numel() for layer in probed.layers}
    base = {f.seed: f.loss for f in rows if f.change == WIDE}
    costs = {
        (layer, gemm): {
            NARROW: statistics.fmean(
                f.loss - base[f.seed] for f in rows if f.change == f"{layer}.{gemm}" and f.seed in base
            ),
            WIDE: 0.0,
        }
        for layer in weights
        for gemm in GEMMS
    }
    choices = choices_of(casts, weights, costs)
    limit = flops_budget(casts, budget)
    found = solve(choices, limit)
    title = f"{choices.amount(found, limit):.3f} {limit.words}, at least measured cost"
    return recipe_text(found, name, title, "experiments/search_forks.py, rows of gemms.csv")


def write_page() -> None:
    """Put the tables between the marks of the page."""
    begin, end = (f"<!-- made by experiments/search_forks.py: {word} -->" for word in ("begin", "end"))
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    tables = markdown_of(*(read_forks(ROWS / f"{name}.csv") for name in ("arms", "gemms")))
    write_whole(PAGE, f"{before}{begin}\n\n{tables}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main()
