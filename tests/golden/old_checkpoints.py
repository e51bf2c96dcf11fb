"""Checkpoints of an earlier commit, one for each recipe, that have to be resumed to the same digits for good.

    python tests/golden/old_checkpoints.py    # keeps the imported package's

Each is the run directory of a training of four steps that was killed after its second: what it holds is what
that commit wrote, and the digits next to it are what the same commit then computed. The layout on
disk is a promise to users, so they are made again only when a recipe is added (its own is added then) or when
a change of the layout is meant, and then this file shows how old runs are read.
"""

import io
import json
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import narrowgauge as ng
from golden.runs import Cell, Worker, digits_of, kept_file, worker

HERE = Path(__file__).parent
ARCHIVE, DIGITS = HERE / "old_checkpoints.tar.xz", kept_file("old_checkpoints")
# As small as a model can be in which every cast has a whole block to scale.
SMALL: dict[str, Any] = {
    "model.dim": 32,
    "model.layers": 1,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn_dim": 32,
    "model.tied_head": True,
    "data.sequence_length": 32,
    "training.steps": 4,
    "training.micro_batch_size": 1,
    "checkpoint.every": 2,
}


def resume(process: Worker, run: Path, recipe: str) -> Cell:
    """The digits of a run that continues from its directory."""
    values = process.values(recipe, {**SMALL, "data.source": "text"})
    process({"run": values, "out": str(run)})
    return digits_of(run)


def kill_after_two(run: Path) -> None:
    """Leave the directory as a kill in the third step leaves it."""
    shutil.rmtree(run / "checkpoints/step-4")
    for name in ("report.html", "gauges.jsonl"):
        (run / name).unlink(missing_ok=True)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if json.loads(line).get("step", 0) > 2)
    (run / "metrics.jsonl").write_text("".join(lines[:last]))
    (run / "status.json").write_text(json.dumps({"status": "running", "reason": ""}))


def extract(recipe: str, directory: Path) -> Path:
    """The kept run directory of a recipe, as this version of torch would have left it.

    A run refuses another version than the one it began with, unless the change is allowed.
    """
    with tarfile.open(ARCHIVE) as archive:
        members = [member for member in archive if member.name.startswith(f"{recipe}/")]
        checked = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 has it
        archive.extractall(directory, members, **checked)
    metrics = directory / recipe / "metrics.jsonl"
    text = re.sub(r'"torch": "[^"]*"', f'"torch": "{torch.__version__}"', metrics.read_text())
    metrics.write_text(text)
    return directory / recipe


def main() -> None:
    """Keep a run of each recipe, and the digits that it continues to."""
    digits = {}
    with tempfile.TemporaryDirectory() as folder, worker(Path(folder)) as process:
        for recipe in ng.recipe_names():
            run = Path(folder) / recipe
            digits[recipe] = resume(process, run, recipe)
            kill_after_two(run)
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for recipe in digits:
                for file in sorted((Path(folder) / recipe).rglob("*")):
                    if file.is_file() and not file.name.startswith(".lock"):
                        member = tarfile.TarInfo(str(file.relative_to(folder)))
                        member.size = file.stat().st_size
                        archive.addfile(member, io.BytesIO(file.read_bytes()))
    DIGITS.write_text(json.dumps(digits, indent=1) + "\n", encoding="utf-8")
    print(ARCHIVE, f"{ARCHIVE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
