"""Measures by paired forks what a search is worth, and whether short forks find the cost of planted faults.

    narrowgauge prepare my-texts/ --tokenizer bpe-2048 --out corpora/ladder
    narrowgauge train experiments/forks.toml --out runs/forks/base
    rm -r runs/forks/base/checkpoints/step-220           # forks continue from the newest checkpoint
    python experiments/forks.py run --base runs/forks/base --out runs/forks
    python experiments/forks.py table

All forks continue one bf16 run of the small model of ladder 2 from step 200, where its rate is still at the
peak, for 20 steps in which it falls to zero (`experiments/forks.toml`, `analysis.forks`). A row of
docs/evidence/forks.csv is a fork: part, seed, change, and its loss on the same held-out tokens. Rows that are
there are not measured again. The parts:

    costs      each GEMM of each layer in MXFP4 alone, the cost table of a search
    recipes    the recipes of searches for 50 and 75 % of FLOPs in MXFP4, head included, by the forks of
               `costs`, and their baselines; seeds that no search has seen. `random` is another recipe for
               each seed. The rows of `estimates` are of a search by costs that were not trained, which lost
               to this one and is gone.
    planted    faults in one place or block, such as zeroed gradients
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import narrowgauge
from narrowgauge.kernels import choose_attention, choose_products
from narrowgauge.quantization import make_cast
from narrowgauge.recipes import GEMM_PLACES, GEMMS, Recipe, Rule, load_recipe
from narrowgauge.system.t_interval import interval
from narrowgauge.trainer.analysis import (
    Forks,
    Probed,
    baselines,
    choices_of,
    flops_budget,
    only_in,
    open_probed,
    recipe_text,
    relative_errors,
    solve,
)
from narrowgauge.trainer.analysis.forks import wide
from narrowgauge.trainer.laboratory.search import _blocks, _weights
from narrowgauge.trainer.report.verdict.rule import judge

ROWS = Path(__file__).parents[1] / "docs" / "evidence" / "forks.csv"
FIELDS = ("part", "seed", "change", "loss")
STEPS, NARROW, WIDE = 20, "mxfp4", "bf16"
COST_SEEDS = (1, 2)
RECIPE_SEEDS = tuple(range(101, 117))
PLANTED_SEEDS = tuple(range(1, 13))
BUDGETS = (0.5, 0.75)
NONE = "none"  # the fork without a change

Changes = Mapping[str, Recipe]
Gaps = Mapping[str, Mapping[int, float]]
Losses = dict[tuple[str, int, str], float]


def planted(recipe: Recipe) -> Changes:
    """Recipes with one fault each, by its name."""
    for factor in (0.5, 0.8, 1.05, 1.25):
        narrowgauge.register_cast(f"times-{int(100 * factor)}", lambda x, factor=factor: x * factor)
    narrowgauge.register_cast("small-to-zero", lambda x: x * (x.abs() >= x.abs().amax() / 16))
    floor = {"cast": "mxfp4", "scale_rule": "floor"}
    places = {
        "block 0: weights times 1.25": ("blocks.0.*", {"fprop.w": "times-125"}),
        "block 1, down: inputs times 0.8": ("blocks.1.down", {"fprop.x": "times-80"}),
        "head: weight times 1.05": ("head", {"fprop.w": "times-105"}),
        "block 0: weights in MXFP4, floor": ("blocks.0.*", {"fprop.w": floor}),
        "block 1: weights in MXFP4, floor": ("blocks.1.*", {"fprop.w": floor}),
        "block 0: inputs in E2M1, one scale": ("blocks.0.*", {"fprop.x": {"element": "e2m1"}}),
        "block 1: dgrad's dy below max / 16 zero": ("blocks.1.*", {"dgrad.dy": "small-to-zero"}),
        "head: wgrad's dy below max / 16 zero": ("head", {"wgrad.dy": "small-to-zero"}),
        "all: wgrad's dy below max / 16 zero": ("*", {"wgrad.dy": "small-to-zero"}),
        "block 1, down: dgrad's dy halved": ("blocks.1.down", {"dgrad.dy": "times-50"}),
        "block 0: wgrad's x in MXFP4, to zero": (
            "blocks.0.*",
            {"wgrad.x": {"cast": "mxfp4", "rounding": "toward-zero"}},
        ),
        "block 0, qkv: wgrad's dy halved": ("blocks.0.qkv", {"wgrad.dy": "times-50"}),
    }
    base = wide(recipe)
    return {
        name: base.with_rules((Rule(casts={p: make_cast(c) for p, c in casts.items()}, modules=(module,)),))
        for name, (module, casts) in places.items()
    }


def gemms(probed: Probed) -> Changes:
    """Recipes with one GEMM of one layer in MXFP4, by LAYER.GEMM."""
    recipe, cast = probed.trained.config.spec.recipe, make_cast(NARROW)
    return {
        f"{layer}.{gemm}": only_in(recipe, layer, {p: cast for p in GEMM_PLACES if p.startswith(gemm)})
        for layer in probed.layers
        for gemm in GEMMS
    }


def searched(probed: Probed, losses: Losses, folder: Path) -> Callable[[int], Changes]:
    """The recipes of the search and of the baselines under each budget, for a seed."""
    casts = {name: make_cast(name) for name in (NARROW, WIDE)}
    weights = _weights(probed)
    gaps = {}
    for gemm in ((layer, gemm) for layer in probed.layers for gemm in GEMMS):
        gaps[gemm, NARROW] = gaps_of(losses, "costs", ".".join(gemm))
        gaps[gemm, WIDE] = dict.fromkeys(gaps[gemm, NARROW], 0.0)
    choices = choices_of(casts, weights, gaps)
    errors, blocks = relative_errors(probed.subject, casts[NARROW]), _blocks(weights)

    def recipes(seed: int) -> Changes:
        found = {}
        for share in BUDGETS:
            budget = flops_budget(casts, share)
            found[f"forks@{share}"] = solve(choices, budget)
            others = baselines(choices, budget, errors, blocks, seed)
            for name, assignment in others.items():
                found[name if name == "uniform" else f"{name}@{share}"] = assignment
        made = {}
        for name, assignment in found.items():
            amount = choices.amount(assignment, flops_budget(casts, 0.5))
            path = folder / f"{name}.toml"
            path.write_text(recipe_text(assignment, name, f"{amount:.3f} in 4 bits", "experiments/forks.py"))
            made[name] = load_recipe(path)
        return made

    return recipes


def read() -> Losses:
    """The losses of all rows."""
    if not ROWS.exists():
        return {}
    with ROWS.open(newline="") as file:
        return {(r["part"], int(r["seed"]), r["change"]): float(r["loss"]) for r in csv.DictReader(file)}


def gaps_of(losses: Losses, part: str, change: str) -> dict[int, float]:
    """The gaps of a change by seed, in nats."""
    return {
        seed: loss - losses[part, seed, NONE]
        for (p, seed, name), loss in losses.items()
        if (p, name) == (part, change)
    }


def run(options: argparse.Namespace) -> None:
    """Measure what is left, seed after seed of each part."""
    torch.set_num_threads(1)
    choose_products("bf16")
    choose_attention("in-order")
    probed = open_probed(options.base, batches=16)
    losses = read()

    def measure(part: str, seed: int, changes: Changes) -> None:
        for name, recipe in {NONE: wide(probed.trained.config.spec.recipe), **changes}.items():
            if (part, seed, name) in losses:
                continue
            losses[part, seed, name] = Forks(STEPS).loss(probed, recipe, seed)
            is_new = not ROWS.exists()
            with ROWS.open("a", newline="") as file:
                writer = csv.writer(file)
                if is_new:
                    writer.writerow(FIELDS)
                writer.writerow((part, seed, name, f"{losses[part, seed, name]:.6f}"))
            print(part, seed, name, losses[part, seed, name], flush=True)

    if "costs" in options.parts:
        for seed in COST_SEEDS:
            measure("costs", seed, gemms(probed))
    if "recipes" in options.parts:
        recipes = searched(probed, losses, options.out)
        for seed in RECIPE_SEEDS:
            measure("recipes", seed, recipes(seed))
    if "planted" in options.parts:
        faults = planted(probed.trained.config.spec.recipe)
        for seed in PLANTED_SEEDS:
            measure("planted", seed, faults)


def tables() -> dict[str, str]:
    """What is done: the tables of recipes and planted faults as Markdown, sums and counts in words."""
    losses = read()
    names = {p: [c for q, _, c in losses if q == p and c != NONE] for p in ("costs", "recipes", "planted")}
    gaps = {p: complete({c: gaps_of(losses, p, c) for c in dict.fromkeys(names[p])}) for p in names}
    by_seed = zip(*(own.values() for own in gaps["costs"].values()), strict=True)
    found = interval([math.fsum(one) for one in by_seed])
    head = "| recipe | seeds | gap, thousandths of a nat | 95 % |\n|---|---:|---:|---:|\n"
    return {
        "recipes": head + table_of(gaps["recipes"]),
        "differences": head.replace("gap", "more than the search by forks")
        + table_of(differences(gaps["recipes"])),
        "costs": head.replace("recipe", "GEMM") + table_of(gaps["costs"]),
        "planted": head.replace("recipe", "fault") + table_of(gaps["planted"]),
        "sum": f"{1e3 * found.mean:.1f}",
        "coverage": coverage(gaps["planted"]),
    }


def table_of(gaps: Gaps) -> str:
    """A line for each change: its gap, and the interval at a deviation pooled over all."""
    lines = []
    for name, judged in judge(gaps, family=()).items():
        half = judged.half_width or math.nan
        ends = f"{1e3 * (judged.mean - half):.2f} .. {1e3 * (judged.mean + half):.2f}"
        lines.append(f"| {name} | {len(gaps[name])} | {1e3 * judged.mean:.2f} | {ends} |")
    return "\n".join(lines)


def complete(gaps: Gaps) -> Gaps:
    """The gaps of the seeds that all changes have."""
    seeds = set.intersection(*(set(own) for own in gaps.values())) if gaps else set()
    return {name: {seed: own[seed] for seed in sorted(seeds)} for name, own in gaps.items()}


def differences(gaps: Gaps) -> Gaps:
    """The gap of each recipe less that of the search by forks under the same budget, by seed."""
    found = {}
    for name, own in gaps.items():
        way, _, budget = name.partition("@")
        ours = gaps.get(f"forks@{budget}")
        if ours is not None and way != "forks":
            found[name] = {seed: gap - ours[seed] for seed, gap in own.items()}
    return found


def coverage(gaps: Gaps) -> str:
    """How often the interval of two seeds covers the mean of all others, seeds taken in disjoint pairs."""
    seeds = list(next(iter(gaps.values()), {}))
    covered, cases = 0, 0
    for few in zip(seeds[::2], seeds[1::2], strict=False):
        judged = judge({name: {s: own[s] for s in few} for name, own in gaps.items()}, family=())
        for name, own in gaps.items():
            mean = statistics.fmean(own[s] for s in seeds if s not in few)
            covered += abs(judged[name].mean - mean) <= (judged[name].half_width or math.nan)
            cases += 1
    return f"{covered} of {cases}"


def main() -> None:
    """Run what is left, or print the tables of what is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--base", type=Path, default=Path("runs/forks/base"), help="the run at step 200")
    parser.add_argument("--out", type=Path, default=Path("runs/forks"), help="the directory of recipes")
    parser.add_argument("--parts", type=lambda s: s.split(","), default=["costs", "recipes", "planted"])
    options = parser.parse_args()
    if options.what == "run":
        run(options)
    else:
        for name, text in tables().items():
            print(f"{name}: {text}\n" if "|" not in text else f"{name}\n\n{text}\n")


if __name__ == "__main__":
    main()
