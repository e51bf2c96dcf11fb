"""Synthetic runs that look like real ones: a loss that falls, noise that all runs share, events, samples."""

import json
import math
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.trainer.runs.run_directory import RunDirectory

CONFIG = """\
[model]
name = "gpt2-124m"
dim = 768
layers = 12
[data]
source = "corpus"
sequence_length = 1024
[training]
steps = {steps}
batch_size = 64
seed = {seed}
compile = false
[optimizer]
name = "adamw"
lr = 6e-4
betas = [0.9, 0.95]
[schedule]
kind = "cosine"
warmup_steps = 20
[recipe]
name = "{recipe}"
[validation]
every = {every}
[checkpoint]
every = {every}
keep = 2
"""


class MakeRun:
    """Writes run directories under one root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self,
        name: str = "fp8",
        *,
        recipe: str = "fp8",
        backend: str = "emulated",
        steps: int = 200,
        worse: float = 0.0,
        status: str = "done",
        reason: str | None = None,
        sample: str = "Once upon a time there was a number.",
        mfu: float | None = None,
        seed: int = 1,
    ) -> Path:
        run = self.root / name
        run.mkdir(parents=True)
        every = max(1, steps // 10)
        (run / "config.toml").write_text(CONFIG.format(steps=steps, recipe=recipe, every=every, seed=seed))
        self.ends(run, status, reason or ("" if status == "done" else "signal 15"))
        lines = [self.start(recipe, backend), {"step": 0, "val_loss": 10.9}]
        lines += self.steps(steps, every, worse, mfu)
        lines.append({"event": "done", "step": steps, "prompt": "Once", "sample": sample})
        self.write(run, lines)
        return run

    @staticmethod
    def write(run: Path, lines: Iterable[dict[str, Any]], name: str = "metrics.jsonl") -> None:
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    @staticmethod
    def records(run: Path) -> list[dict[str, Any]]:
        """All lines of the metrics of a run."""
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def seeds(self, recipe: str, losses: Iterable[float], first: int = 0, **how: Any) -> list[Path]:
        """A run of 20 steps for each seed, whose last validation loss is given."""
        runs = []
        for seed, loss in enumerate(losses, first):
            folder = f"{recipe}-seed-{seed}" if seed else recipe
            runs.append(self(folder, recipe=recipe.rpartition("/")[2], steps=20, seed=seed, **how))
            self.last_validation(runs[-1], val_loss=loss)
        return runs

    def edit(self, run: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Change keys of each record; None drops it."""
        lines = [(line, change(line)) for line in self.records(run)]
        self.write(run, [line | keys for line, keys in lines if keys is not None])

    def last_validation(self, run: Path, **keys: Any) -> None:
        last = max(line["step"] for line in self.records(run) if "val_loss" in line)
        self.edit(run, lambda line: keys if line["step"] == last and "val_loss" in line else {})

    def set(self, run: Path, old: str, new: str) -> None:
        """Replace a text of the configuration."""
        text = (run / "config.toml").read_text()
        assert old in text
        (run / "config.toml").write_text(text.replace(old, new))

    def ends(self, run: Path, status: str, reason: str = "") -> None:
        RunDirectory(run).set_status(status, reason)

    def works(self, run: Path, is_alive: bool = True) -> None:
        """The run is recorded as at work: this process holds it, or one that has ended."""
        self.ends(run, "running")
        process = os.getpid() if is_alive else 2**22 + 1
        (run / ".lock").write_text(f"process {process} on host {os.uname().nodename}\n")

    def plan(self, folder: Path, *names: str, steps: int = 200, rows: str = "") -> None:
        """comparison.json as `compare` writes it; the first run is the reference."""
        arms = [name.partition("-seed")[0] for name in names]
        runs = [
            {"name": name, "arm": arm, "seed": 1, "rung": 1, "steps": steps, "tokens": 9}
            for name, arm in zip(names, arms, strict=True)
        ]
        family = list(dict.fromkeys(arms))
        rest = {"command": "narrowgauge compare", "seeds": [1], "parameters": 9, "rows": rows}
        text = json.dumps({"reference": family[0], "family": family[1:], "runs": runs, **rest})
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "comparison.json").write_text(text)

    def append(self, run: Path, text: str) -> None:
        """Add raw text to the metrics of a run, as a writer would."""
        with (run / "metrics.jsonl").open("a") as file:
            file.write(text)

    def start(self, recipe: str, backend: str) -> dict[str, Any]:
        return {
            "event": "start",
            "step": 0,
            "recipe": recipe,
            "backend": backend,
            "device": "cpu",
            "torch": "2.13.0",
            "peak_source": "989 TFLOP/s, dense BF16 of an H100 SXM",
        }

    def steps(self, steps: int, every: int, worse: float, mfu: float | None) -> list[dict[str, Any]]:
        shared, own = random.Random(1), random.Random(worse)
        lines: list[dict[str, Any]] = []
        for step in range(1, steps + 1):
            done = step / steps
            falling = 3.2 + 7.7 * math.exp(-18 * done) + 0.9 * (1 - done)
            loss = falling + worse * done + shared.gauss(0, 0.06) + own.gauss(0, 0.01)
            speed = (400 if step < 3 else 3100) * own.gauss(1, 0.02)
            line = {
                "step": step,
                "loss": loss,
                "lr": 6e-4 * min(1, step / (0.05 * steps)) * (0.55 + 0.45 * math.cos(math.pi * done)),
                "grad_norm": 0.4 + 3 * math.exp(-10 * done) + abs(shared.gauss(0, 0.08)),
                "tokens": 65_536 * step,
                "tokens_per_s": speed,
                "step_ms": 65_536_000 / speed,
                "mfu": mfu,
                "memory_bytes": 3_000_000_000 + step,
            }
            if step % every == 0:
                line["val_loss"] = loss + 0.03
            lines.append(line)
            if step % every == 0:
                lines.append({"event": "save", "step": step, "seconds": 0.4})
            if step == steps // 2:
                lines.append({"event": "resume", "step": step, "reason": "the machine was restarted"})
        return lines


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return MakeRun(tmp_path / "runs")
