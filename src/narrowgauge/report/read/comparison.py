"""What a comparison is about to train: OUT/comparison.json, which `compare` writes before its first run.

    {"command", "reference", "family", "seeds", "parameters", "is_calm", "rows",
     "runs": [{"name", "arm", "seed", "rung", "steps", "tokens"}, ...]}

The runs are in the order of training, the reference's first. A reader learns from it which runs are
still to come; what has happened is in the run directories.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARISON = "comparison.json"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a comparison; rung 0 is a fork, whose steps several runs share."""

    name: str
    arm: str
    seed: int
    rung: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PlannedComparison:
    """A comparison as it was started.

    Attributes:
        command: Its command line; "" if it was started from Python.
        reference: The arm that the others are compared with.
        family: The arms that are compared, without the reference and controls.
        seeds: The seeds of each arm.
        parameters: Parameters in linear layers, to which tokens are related.
        is_calm: Whether no warm-up is expected to spike; False in the file of an older version.
        rows: The file of results of a measured experiment; "" for a comparison that has none.
        runs: All runs in the order of training.
    """

    command: str
    reference: str
    family: tuple[str, ...]
    seeds: tuple[int, ...]
    parameters: int
    is_calm: bool
    rows: str
    runs: tuple[PlannedRun, ...]

    @property
    def compared(self) -> list[PlannedRun]:
        """The runs at the highest rung, the reference's first."""
        last = max((run.rung for run in self.runs), default=0)
        found = [run for run in self.runs if run.rung == last]
        return sorted(found, key=lambda run: run.arm != self.reference)


def read_comparison(folder: Path) -> PlannedComparison | None:
    """The plan of the comparison in a folder; None if the file is missing or is not a plan."""
    try:
        found = json.loads((folder / COMPARISON).read_bytes())
        return PlannedComparison(
            command=str(found["command"]),
            reference=str(found["reference"]),
            family=tuple(map(str, found["family"])),
            seeds=tuple(map(int, found["seeds"])),
            parameters=int(found["parameters"]),
            is_calm=found.get("is_calm") is True,
            rows=str(found["rows"]),
            runs=tuple(map(_run, found["runs"])),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _run(found: Mapping[str, Any]) -> PlannedRun:
    """A planned run. Its name is that of a directory in the folder, never a path that leads elsewhere."""
    name, arm = str(found["name"]), str(found["arm"])
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(name)
    return PlannedRun(name, arm, *(int(found[key]) for key in ("seed", "rung", "steps", "tokens")))
