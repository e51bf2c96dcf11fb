"""Which runs belong together, and which is compared with which.

Runs that differ in nothing but `training.seed` are one variant; the first run's variant is the reference. A
seed decides the weights a run starts from and the order of its tokens, so a run is compared with the
reference's run of the same seed, and with no other.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from narrowgauge.report.read.run import Run


@dataclass(frozen=True)
class Group:
    """The runs of one variant by seed, in the order in which they were given."""

    name: str
    runs: dict[int, Run]

    def mean(self, value: Callable[[Run], float | None]) -> float | None:
        """Mean of a value over the runs that have it; None if no run has it."""
        values = [v for run in self.runs.values() if (v := value(run)) is not None]
        return statistics.fmean(values) if values else None


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group runs by variant, in the order of their first runs; a repeated seed starts another group."""
    by_variant: dict[str, Group] = {}
    for run in runs:
        config = {section: dict(table) for section, table in run.config.items() if isinstance(table, dict)}
        config.get("training", {}).pop("seed", None)
        config.pop("log", None)  # decides only what is shown
        key = json.dumps(config, sort_keys=True, default=str) if config else run.name
        while key in by_variant and run.seed in by_variant[key].runs:
            key += " again"
        group = by_variant.setdefault(key, Group(run.name.removesuffix(f"-seed-{run.seed}"), {}))
        group.runs[run.seed] = run
    return list(by_variant.values())


def references(all_groups: Sequence[Group]) -> dict[int, Run]:
    """The run that each run is compared with, by `id` of the run.

    It is the first group's run of the same seed. The runs of the first group, and runs of seeds that it does
    not have, are compared with none and left out.
    """
    reference = all_groups[0].runs
    return {
        id(run): reference[seed]
        for group in all_groups[1:]
        for seed, run in group.runs.items()
        if seed in reference
    }
