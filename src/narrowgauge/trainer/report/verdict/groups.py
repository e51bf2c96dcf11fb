"""Groups runs into variants, and pairs each run with its reference.

Runs that differ only in `training.seed`, or in the threads that they pin, are one variant; the first run's
variant is the reference. A seed determines a run's initial weights and the order of its tokens, so a run is
compared only with the reference's run of the same seed.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.verdict.rule import is_control

_AGAIN = " again"


@dataclass(frozen=True)
class Group:
    """The runs of one variant by seed, in the given order.

    Attributes:
        name: The name of the variant: that of its runs, without their seeds.
        runs: Its runs by seed.
        is_control: Whether it repeats the reference's configuration, or has the name of a control.
    """

    name: str
    runs: dict[int, Run]
    is_control: bool = False

    def mean(self, value: Callable[[Run], float | None]) -> float | None:
        """Mean of a value over the runs that have it; None if no run has it."""
        values = [v for run in self.runs.values() if (v := value(run)) is not None]
        return statistics.fmean(values) if values else None


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group runs by variant, in the order of their first runs; a repeated seed starts another group."""
    by_variant: dict[str, dict[int, Run]] = {}
    for run in runs:
        config = {section: dict(table) for section, table in run.config.items() if isinstance(table, dict)}
        for key in ("seed", "threads"):  # runs that began alone do not pin threads, a comparison's runs do
            config.get("training", {}).pop(key, None)
        config.pop("log", None)  # affects only the display
        key = json.dumps(config, sort_keys=True, default=str) if config else run.name
        while key in by_variant and run.seed in by_variant[key]:
            key += _AGAIN
        by_variant.setdefault(key, {})[run.seed] = run
    first = next(iter(by_variant), "")
    found: list[Group] = []
    for key, members in by_variant.items():
        run = next(iter(members.values()))
        name = run.name.removesuffix(f"-seed-{run.seed}")
        repeats = key.startswith(first + _AGAIN)
        found.append(Group(name, members, repeats or (bool(found) and is_control(name, found[0].name))))
    return found


def references(all_groups: Sequence[Group]) -> dict[int, Run]:
    """The run that each run is compared with, by `id` of the run.

    It is the first group's run with the same seed. Runs of the first group, and runs with seeds that it
    lacks, have no reference and are left out.
    """
    reference = all_groups[0].runs
    return {
        id(run): reference[seed]
        for group in all_groups[1:]
        for seed, run in group.runs.items()
        if seed in reference
    }
