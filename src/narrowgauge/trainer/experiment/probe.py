"""The probe of an experiment: the effect of each arm's recipe on the reference's model, without training.

It is measured once all runs are done, on the reference's run of the first seed at the highest rung, and kept
in OUT/probe.json. So a reader sees which figure of a minute predicts the gap of hours.
"""

import json
from dataclasses import replace
from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import write_whole
from narrowgauge.trainer.analysis import open_probed, probe, probe_json
from narrowgauge.trainer.experiment.design import Experiment
from narrowgauge.trainer.experiment.jobs import state_of
from narrowgauge.trainer.report.read.stored import Probe, read_stored
from narrowgauge.trainer.runs.run_directory import PROBE

_BATCHES, _DRAWS = 4, 4


def probe_arms(experiment: Experiment, out: Path) -> None:
    """Probe the recipe of each arm whose runs are done and that is not yet in OUT/probe.json."""
    trunk = experiment.trunks[0]
    kept = read_stored(Probe, out / PROBE)
    known = kept.model_dump()["recipes"] if kept else {}
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
