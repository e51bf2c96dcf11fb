"""A text and values for a tiny run, and the content of a run directory."""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.trainer.checkpoint import steps
from narrowgauge.trainer.checkpoint.store.manifest import read_manifest
from narrowgauge.trainer.training import Config, make_config

WORDS = ["narrow", "gauge", "rail", "train", "coal", "steam", "valley", "signal"]
Values = dict[str, dict[str, Any]]


def write_text(directory: Path, documents: int = 12, seed: int = 0) -> str:
    """Documents of about 110 characters: 12 of them make an epoch of some 35 sequences of 32 bytes."""
    rng = random.Random(seed)
    directory.mkdir(exist_ok=True)
    for i in range(documents):
        (directory / f"{i:02}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(18)) + "\n")
    return str(directory)


def config_of(
    recipe: object, model: Mapping[str, Any], length: int, parallel: object = None, **training: Any
) -> Config:
    """The configuration of a model under a recipe: of eight sequences a step and two at once, or as given."""
    values = {
        "model": {"name": "debug", **model},
        "data": {"sequence_length": length},
        "training": {"batch_size": 8, "micro_batch_size": 2, **training},
        "recipe": {"name": str(recipe)},
    }
    return make_config(values if parallel is None else values | {"parallel": parallel})


def interrupted(path: Path, *lost: int) -> Path:
    """A run as if it had been killed before its end, and before these steps were saved."""
    (path / "status.json").unlink()
    for step in lost:
        shutil.rmtree(path / "checkpoints" / f"step-{step}")
    return path


class Look:
    """The content of a run directory, read without the code under test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of the metrics; none may be torn."""
        text = (self.path / "metrics.jsonl").read_text()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of training steps."""
        return [line for line in self.lines if "loss" in line]

    def column(self, key: str) -> list[Any]:
        """One key of every training step."""
        return [line[key] for line in self.steps]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == kind]

    @property
    def status(self) -> dict[str, str]:
        return json.loads((self.path / "status.json").read_text())

    @property
    def trajectory(self) -> tuple[list[dict[str, str]], dict[str, str]]:
        """What has to be the same after any number of kills: the digits of every step's numbers as they stand
        in the file, each step once and in order, and the digests of the last checkpoint's files."""
        digits = []
        for line in (self.path / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line, parse_float=str, parse_int=str)
            if "event" not in record:
                keys = ("step", "loss", "grad_norm", "lr", "tokens", "val_loss")
                digits.append({key: record[key] for key in keys if key in record})
        checkpoints = self.path / "checkpoints"
        manifest = read_manifest(checkpoints / f"step-{steps(checkpoints)[-1]}")
        return digits, {name: entry.sha256 for name, entry in manifest.files.items()}

    def has_step(self, step: int, resumes: int = 0) -> Callable[[], bool]:
        """A question for `Process.send_when`: is the step done, after the run was resumed n times?"""
        file, mark = self.path / "metrics.jsonl", f'{{"step": {step}, "loss"'

        def arrived() -> bool:
            text = file.read_text() if file.exists() else ""
            return mark in text and text.count('"event": "resume"') >= resumes

        return arrived
