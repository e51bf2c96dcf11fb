"""Synthetic runs that look like real ones: a loss that falls, noise that all runs share, events, samples."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

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
seed = 1
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
        sample: str = "Once upon a time there was a number.",
        mfu: float | None = None,
    ) -> Path:
        run = self.root / name
        run.mkdir(parents=True)
        every = max(1, steps // 10)
        (run / "config.toml").write_text(CONFIG.format(steps=steps, recipe=recipe, every=every))
        reason = "" if status == "done" else "signal 15"
        (run / "status.json").write_text(json.dumps({"status": status, "reason": reason}))
        lines = [self.start(recipe, backend), {"step": 0, "val_loss": 10.9}]
        lines += self.steps(steps, every, worse, mfu)
        lines.append({"event": "done", "step": steps, "prompt": "Once", "sample": sample})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    def plan(self, folder: Path, *names: str, steps: int = 200) -> None:
        """comparison.json as `compare` writes it; the first run is the reference."""
        runs = [
            {
                "name": name,
                "arm": name.partition("-seed")[0],
                "seed": 1,
                "rung": 1,
                "steps": steps,
                "tokens": 9,
            }
            for name in names
        ]
        arms = list(dict.fromkeys(run["arm"] for run in runs))
        rest = {"command": "narrowgauge compare", "seeds": [1], "parameters": 9, "rows": ""}
        text = json.dumps({"reference": arms[0], "family": arms[1:], "runs": runs, **rest})
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
            "backend_reason": "the device has no FP8 GEMM",
            "device": "cpu",
            "torch": "2.13.0",
            "parameters": 124_439_808,
            "flops_per_token": 8.0e8,
            "peak_flops": 9.9e14,
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
            lines += self.events(step, steps, every, worse)
        return lines

    def events(self, step: int, steps: int, every: int, worse: float) -> list[dict[str, Any]]:
        happened: list[dict[str, Any]] = []
        if step % every == 0:
            happened.append({"event": "save", "step": step, "seconds": 0.4})
        if step == steps // 2:
            happened.append({"event": "resume", "step": step, "reason": "the machine was restarted"})
        if step == 2 * steps // 3 and worse > 0.1:
            happened.append(
                {"event": "skip", "step": step, "reason": "the gradient norm was 41 times the median"}
            )
        return happened


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return MakeRun(tmp_path / "runs")
