"""Where training ends under each recipe, over several seeds: the final validation loss beside a reference's.

A recipe may carry changes, as on the command line: `msamp-o2+v=e4m3` is `--recipe msamp-o2 --recipe.v e4m3`.
The runs are ordinary ones, in a directory each, one after the other; finished runs are read and not repeated,
so the same line continues a campaign that was stopped. The table is Markdown, from the runs' own records.

    python benchmarks/convergence.py --out runs/state --recipes bf16,msamp-o1,msamp-o2+v=e4m3 --steps 300

Everything after `--` goes to every run, for example `-- --model.layers 4`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path


def arguments_of(recipe: str) -> list[str]:
    """The command-line arguments for a recipe with its changes."""
    name, *changes = recipe.split("+")
    pairs = [change.partition("=") for change in changes]
    return ["--recipe", name, *(word for key, _, value in pairs for word in (f"--recipe.{key}", value))]


def final_validation_loss(directory: Path) -> float | None:
    """Of a finished run; none of a run that did not reach its end."""
    try:
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return None
    if not any(record.get("event") == "done" for record in records):
        return None
    return [record["val_loss"] for record in records if "val_loss" in record][-1]


def run(recipe: str, seed: int, options: argparse.Namespace) -> float:
    """Train, or continue, or only read what has been trained; a run that diverges counts as infinite."""
    directory = options.out / f"{recipe}-seed{seed}"
    line = [sys.executable, "-m", "narrowgauge", "train", "--out", str(directory), *arguments_of(recipe)]
    line += ["--steps", str(options.steps), "--seed", str(seed), *options.rest]
    if final_validation_loss(directory) is None:
        print(f"{recipe}, seed {seed}", file=sys.stderr, flush=True)
        if subprocess.run(line, stdout=subprocess.DEVNULL).returncode == 2:
            sys.exit(2)  # the run has said why
    loss = final_validation_loss(directory)
    return float("inf") if loss is None else loss


def row(recipe: str, losses: list[float], reference: list[float]) -> str:
    """A line of the table: each seed's loss, the mean, and the differences from the reference by seed."""
    apart = [100 * (loss / base - 1) for loss, base in zip(losses, reference, strict=True)]
    mean, mean_apart = statistics.mean(losses), statistics.mean(apart)
    cells = [recipe, *(f"{loss:.4f}" for loss in losses), f"{mean:.4f}", f"{mean_apart:+.2f} %"]
    return f"| {' | '.join([*cells, f'{min(apart):+.2f} to {max(apart):+.2f} %'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--recipes", required=True, help="the first is the reference")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("rest", nargs="*", help="arguments for every run")
    options = parser.parse_args()
    recipes, seeds = options.recipes.split(","), [int(seed) for seed in options.seeds.split(",")]
    losses = {recipe: [run(recipe, seed, options) for seed in seeds] for recipe in recipes}
    titles = ["recipe", *(f"seed {seed}" for seed in seeds), "mean", f"from {recipes[0]}", "of each seed"]
    print(f"| {' | '.join(titles)} |")
    print(f"|{'---|' * len(titles)}")
    for recipe in recipes:
        print(row(recipe, losses[recipe], losses[recipes[0]]))


if __name__ == "__main__":
    main()
