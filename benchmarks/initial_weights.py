"""How training begins under two rules for initial weights, over widths: spikes of the gradient norm, loss.

The rules are one standard deviation for all weights (`model.initial_std = 0.02`) and one for each role
(`model.initial_std = 0`: `src/narrowgauge/trainer/models/initial_weights.py`). A width has heads of 64 and
an MLP three times as wide. Both rules see the same tokens, at the same learning rate. A spike is a gradient
norm, after the fifth step, above three times the median of the twenty before it.

The runs are ordinary ones, in a directory each, one after the other, in this process. A finished run is read
and not repeated. The table is printed as Markdown.

    python benchmarks/initial_weights.py --out runs/initial --widths 64,128,256,512,768 --seeds 0,1

Everything after `--` goes to every run as KEY=VALUE, for example `-- training.batch_size=4`.
"""

import argparse
import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import narrowgauge as ng
from narrowgauge.guard.guard import spike_ratio

RULES = {"0.02": 0.02, "by role": 0.0}


def run(width: int, rule: str, seed: int, options: argparse.Namespace) -> tuple[int, float, float]:
    """Train, or only read what has been trained: spikes, largest gradient norm, last validation loss."""
    values: dict[str, dict[str, Any]] = {
        "model": {"name": options.model, "dim": width, "heads": width // 64, "kv_heads": width // 64}
        | {"ffn_dim": 3 * width, "initial_std": RULES[rule]},
        "training": {"steps": options.steps, "seed": seed, "device": "cpu"},
        "schedule": {"warmup_steps": options.warmup},
        "recipe": {"name": "bf16"},
        "validation": {"every": options.steps},
        "checkpoint": {"every": options.steps},
        "gauges": {"every": 0},
    }
    for word in options.rest:
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    out = options.out / f"{options.model}-{width}-{rule.replace(' ', '-')}-seed{seed}"
    ng.run(values, out, Console(file=io.StringIO()))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    norms = [line["grad_norm"] for line in lines if "grad_norm" in line]
    count = sum(spike_ratio(norms[:step], norm) > 0 for step, norm in enumerate(norms))
    return count, max(norms[5:]), [line["val_loss"] for line in lines if "val_loss" in line][-1]


def row(width: int, rule: str, found: Sequence[tuple[int, float, float]]) -> str:
    """A line of the table: the spikes of each seed, the largest norm of any, the losses and their mean."""
    counts, norms, losses = zip(*found, strict=True)
    cells = [str(width), rule, ", ".join(map(str, counts)), f"{max(norms):.2f}"]
    cells += [", ".join(f"{loss:.4f}" for loss in losses), f"{statistics.mean(losses):.4f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--model", default="debug", help="the named size that the widths vary")
    parser.add_argument("--widths", default="64,128,256,512,768")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("rest", nargs="*", metavar="KEY=VALUE", help="keys of every run")
    options = parser.parse_args()
    titles = ["width", "initial weights", "spikes", "largest norm", "validation loss", "mean"]
    print(f"| {' | '.join(titles)} |")
    print(f"|{'---|' * len(titles)}", flush=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for width in map(int, options.widths.split(",")):
        for rule in RULES:
            print(row(width, rule, [run(width, rule, seed, options) for seed in seeds]), flush=True)


if __name__ == "__main__":
    main()
