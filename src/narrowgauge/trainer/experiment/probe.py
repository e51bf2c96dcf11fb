"""The probe of an experiment: the effect of each arm's recipe on the reference's model, without training.

It is measured once all runs are done, on the reference's run of the first seed at the highest rung, and kept
in OUT/probe.json. So a reader sees which figure of a minute predicts the gap of hours.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_whole
from narrowgauge.trainer.analysis import open_probed, probe, probe_json
from narrowgauge.trainer.experiment.design import Experiment
from narrowgauge.trainer.experiment.jobs import state_of
from narrowgauge.trainer.runs.run_directory import PROBE

_BATCHES, _DRAWS = 4, 4


def read_probe(out: Path) -> Mapping[str, Any] | None:
    """The stored probe of an experiment; None if there is none yet."""
    try:
        found = json.loads((out / PROBE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "recipes" in found else None


def probe_arms(experiment: Experiment, out: Path) -> None:
    """Probe the recipe of each arm whose runs are done and that is not yet in OUT/probe.json."""
    trunk = experiment.trunks[0]
    known = dict((read_probe(out) or {}).get("recipes", {}))
    recipes = {
        run.arm: run.config.spec.recipe for run in experiment.trunks if state_of(out / run.name) == "done"
    }
    new = [replace(recipe, name=arm) for arm, recipe in recipes.items() if arm not in known]
    if not new or state_of(out / trunk.name) != "done":
        return
    try:
        subject = open_probed(out / trunk.name, trunk.config.training.device, batches=_BATCHES).subject
    except UserError:  # its checkpoint was removed by hand: the gaps are reported without it
        return
    found = probe_json(probe(subject, new, _DRAWS), run=trunk.name, draws=_DRAWS)
    by_arm = {**known, **found["recipes"]}
    found["recipes"] = {arm: by_arm[arm] for arm in experiment.arms if arm in by_arm}
    write_whole(out / PROBE, json.dumps(found, indent=1) + "\n")
