"""Which runs survive their narrow numbers, under each answer of the guard to a spike?

An arm is a way of training that breaks. Each is trained with `guard.spike` = off, skip, rollback and raise,
over several seeds, and once a seed in bf16. A run survives if it comes to its end, and its last validation
loss is at most `--within` percent above that of bf16 with the same seed and options.

    v-e4m3            msamp-o2 with the second moment in E4M3, which FP8-LM warns of
    e2m1-gradients    gradients in E2M1 with one scale a tensor
    fp16-unscaled     FP16 operands without loss scaling (products in fp32)
    delayed-lr-step   delayed scaling, and halfway the learning rate is ten times as large

The runs are ordinary ones, in a directory each, one after the other. A finished run is read and not repeated,
a run that was killed goes on, so the same line continues a campaign that was stopped. `OUT/survival.csv` has
one line a run; the table is printed as Markdown.

    python benchmarks/survival.py --out runs/survival --seeds 0,1,2,3,4,5,6,7,8,9

Everything after `--` goes to every run, for example `-- --training.batch_size 2`.
"""

import argparse
import csv
import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

E2M1 = '{element = "e2m1"}'
POLICIES = ("off", "skip", "rollback", "raise")
ARMS = {
    "v-e4m3": ["--recipe", "msamp-o2", "--recipe.v", "e4m3"],
    "e2m1-gradients": ["--recipe", "bf16", "--recipe.dgrad.dy", E2M1, "--recipe.wgrad.dy", E2M1],
    "fp16-unscaled": ["--recipe", "fp16", "--recipe.compute", "fp32"],
    "delayed-lr-step": ["--recipe", "fp8-delayed"],
}
LR, LATER_LR = 2e-3, 2e-2
# A short window, as the runs are short; a large factor, since bf16 has norms of 10 medians here and goes on.
GUARD = ["--guard.spike_window", "16", "--guard.spike_factor", "20"]
GUARD += ["--checkpoint.every", "10", "--checkpoint.keep", "4"]
FIELDS = ("arm", "policy", "seed", "status", "val_loss", "bf16_loss", "survived", "events")


def lines_of(arm: str, recipe: list[str], options: argparse.Namespace) -> list[list[str]]:
    """The arguments of a run: of two, where its learning rate changes on the way."""
    if arm != "delayed-lr-step":
        return [[*recipe, "--steps", str(options.steps), "--schedule.warmup_steps", str(options.warmup)]]
    constant = [*recipe, "--schedule.kind", "constant", "--schedule.warmup_steps", str(options.warmup)]
    return [
        [*constant, "--steps", str(options.steps // 2), "--optimizer.lr", str(LR)],
        [
            *constant,
            *("--steps", str(options.steps), "--optimizer.lr", str(LATER_LR)),
            *("--allow-change", "training.steps,optimizer.lr"),
        ],
    ]


def records(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; none of a run that has not begun."""
    file = directory / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def begun(directory: Path, steps: int) -> bool:
    """Whether a run of so many steps has begun."""
    file = directory / "config.toml"
    return file.exists() and tomllib.loads(file.read_text())["training"]["steps"] == steps


def train(directory: Path, lines: list[list[str]], options: argparse.Namespace, more: list[str]) -> str:
    """Train a run to its end, or only read how it ended: done or failed."""
    ended = directory / "ended"
    if ended.exists():
        return ended.read_text()
    print(directory.name, file=sys.stderr, flush=True)
    code = 0
    for line in lines[1:] if begun(directory, options.steps) and len(lines) > 1 else lines:
        words = [sys.executable, "-m", "narrowgauge", "train", "--out", str(directory), *line]
        code = subprocess.run([*words, *more, *options.rest], stdout=subprocess.DEVNULL).returncode
        if code not in (0, 1):  # the run has said why; or it was stopped, and the same line goes on
            sys.exit(code)
        if code:
            break
    ended.write_text("failed" if code else "done")
    return ended.read_text()


def last_loss(directory: Path) -> float:
    """The last validation loss of a run."""
    return float([r["val_loss"] for r in records(directory) if r.get("val_loss") is not None][-1])


def told(directory: Path) -> str:
    """What the guard did, counted, and what it raised."""
    events = [r for r in records(directory) if r.get("event") in ("skip", "rollback", "raise", "lower")]
    counts = {kind: sum(e["event"] == kind for e in events) for kind in ("skip", "rollback")}
    words = [f"{count} {kind}" for kind, count in counts.items() if count]
    words += [
        f"raise {e['place']} of {len(e['layers'])} from {e['step']}" for e in events if e["event"] == "raise"
    ]
    return "; ".join(words)


def campaign(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs that are asked for, one row each; the CSV is written after every run."""
    rows: list[dict[str, Any]] = []
    for arm in options.arms.split(","):
        for seed in options.seeds.split(","):
            reference = options.out / f"{arm}-bf16-{seed}"
            plain = ["--seed", seed, "--guard.spike", "off"]
            train(reference, lines_of(arm, ["--recipe", "bf16"], options), options, plain)
            bf16 = last_loss(reference)
            for policy in options.policies.split(","):
                out = options.out / f"{arm}-{policy}-{seed}"
                more = ["--seed", seed, "--guard.spike", policy, *GUARD]
                status = train(out, lines_of(arm, ARMS[arm], options), options, more)
                loss = last_loss(out) if status == "done" else math.nan
                survived = loss <= bf16 * (1 + options.within / 100)
                row = (arm, policy, seed, status, loss, bf16, survived, told(out))
                rows.append(dict(zip(FIELDS, row, strict=True)))
                with (options.out / "survival.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, FIELDS)
                    writer.writeheader()
                    writer.writerows(rows)
    return rows


def table(rows: list[dict[str, Any]], policies: list[str]) -> str:
    """Survivors of each arm under each policy, and the validation losses of all seeds beside bf16's."""
    lines = [f"| arm | {' | '.join(policies)} | bf16 |", "|---" * (len(policies) + 2) + "|"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = []
        for policy in policies:
            own = [row for row in rows if (row["arm"], row["policy"]) == (arm, policy)]
            losses = ", ".join("ended" if r["status"] == "failed" else f"{r['val_loss']:.3f}" for r in own)
            cells.append(f"{sum(row['survived'] for row in own)} of {len(own)} ({losses})")
        bf16 = {row["seed"]: f"{row['bf16_loss']:.3f}" for row in rows if row["arm"] == arm}
        lines.append(f"| {arm} | {' | '.join(cells)} | {', '.join(bf16.values())} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seeds", default="0,1,2,3,4,5,6,7,8,9")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--within", type=float, default=5.0, help="percent above bf16 that count as survival")
    parser.add_argument("rest", nargs="*", help="arguments for every run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(table(campaign(options), options.policies.split(",")))


if __name__ == "__main__":
    main()
