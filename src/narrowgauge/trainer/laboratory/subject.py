"""A model on held-out text, as probes, sensitivities and searches measure it, and where results are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from narrowgauge.formats import Format
from narrowgauge.quantization import Cast, make_cast
from narrowgauge.recipes import recipe
from narrowgauge.system.files import write_whole
from narrowgauge.trainer import analysis  # each name is imported when it is used, and with it torch
from narrowgauge.trainer.laboratory.arguments import Text

FEW: Text = {"batches": 4}  # of what takes many passes for each batch


def facts(probed: analysis.Probed) -> dict[str, int]:
    """The step of a subject, and the size of its text."""
    batches = probed.subject.batches
    tokens = sum(batch.targets for batch in batches)
    return {"step": probed.trained.step, "batches": len(batches), "tokens": tokens}


def heading(run: Path, probed: analysis.Probed) -> str:
    """The heading of a result: the model, and the text it was measured on."""
    found = facts(probed)
    return f"{run} after step {found['step']}, {found['tokens']:,} tokens in {found['batches']} batches"


def keep(run: Path, name: str, found: dict[str, Any]) -> None:
    """Store a result in a run directory, for the report; models of other programs are left unchanged."""
    if (run / "config.toml").is_file():
        write_whole(run / name, json.dumps(found, indent=1) + "\n")


def operand_cast(given: str | Format | Cast | dict[str, Any]) -> Cast:
    """A cast for an operand of a matmul, by name, format or table."""
    cast = make_cast(given)  # without a place in its error message
    return recipe("fp32").with_places({"fprop.x": cast}).casts["fprop.x"]
