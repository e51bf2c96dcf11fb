"""A run directory read into plain values, and the runs in folders.

Each of its files (`runs.run_directory`) may be incomplete, torn or missing. `records` reads them, and this
module holds the run. A folder is searched without its content making anything fail; of the metrics of its
runs only the end is read, so a folder of long runs is listed quickly.

A run writes that it is running, done, preempted or failed. A reader adds (`RunState`): killed, if it is
running and no process holds it; diverged, if that is why it failed; silent, if its process has recorded
nothing for much longer than its steps take; waiting, if it is planned and has no directory; broken, if its
files cannot be read; unknown, if it left no status.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint import is_abandoned
from narrowgauge.trainer.report.read import records
from narrowgauge.trainer.report.read.records import Step, Validation, finite
from narrowgauge.trainer.report.read.stored import Costs, Probe, Stored, read_stored

CONFIG, METRICS, STATUS = "config.toml", "metrics.jsonl", "status.json"
FINAL_STEPS = 10  # the final train loss is a mean over this many steps: a single batch is mostly luck
RunState = Literal[
    "running", "done", "preempted", "failed", "killed", "diverged", "silent", "waiting", "broken", "unknown"
]
ENDED: tuple[RunState, ...] = ("done", "diverged", "failed")
GUARD = ("skip", "spike", "rollback", "raise", "not finite")  # what the guard records
PACE_STEPS = 50  # the pace is the median of this many steps
WARMUP_STEPS = 3  # allocation and compilation make the first steps slow


@dataclass(frozen=True)
class Run:
    """The contents of one run directory.

    `steps` and `validation` are in the order of their step numbers, `events` in the order of the file.
    Losses are in nats per token, memory in bytes, `mfu` is a fraction.
    """

    name: str
    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    validation: Sequence[Validation] = ()
    events: Sequence[Mapping[str, Any]] = ()
    status: RunState = "waiting"
    reason: str = ""
    ignored_lines: int = 0
    gauges: Sequence[Mapping[str, Any]] = ()  # lines of gauges.jsonl, for all steps or some
    probe: Probe | None = None
    costs: Costs | None = None
    recipe_text: str = ""

    def setting(self, section: str, key: str) -> Any:
        """A value of the configuration; None if it is not there."""
        table = self.config.get(section)
        return table.get(key) if isinstance(table, Mapping) else None

    @property
    def facts(self) -> dict[str, Any]:
        """The facts in the start and resume events; the last event wins for each key."""
        starts = [event for event in self.events if event["event"] in ("start", "resume")]
        facts = {key: value for event in starts for key, value in event.items()}
        return {key: value for key, value in facts.items() if key not in ("event", "step", "reason")}

    @property
    def has_failed(self) -> bool:
        """Whether it failed, or diverged."""
        return self.status in ("failed", "diverged")

    @property
    def recipe(self) -> str:
        """The name of the recipe; "" if unknown."""
        return str(self.facts.get("recipe") or self.setting("recipe", "name") or "")

    @property
    def backend(self) -> str:
        """ "native", "emulated" or "high precision"; "" before the first start."""
        return str(self.facts.get("backend") or "")

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.steps[-1].tokens if self.steps else 0

    @property
    def final_train_loss(self) -> float | None:
        """Mean loss over the last 10 steps; NaN if one of them was not finite, None before the first step."""
        losses = [step.loss for step in self.steps[-FINAL_STEPS:]]
        return sum(losses) / len(losses) if losses else None

    @property
    def final_validation(self) -> Validation | None:
        """The last validation of trained weights; None if there is only the one before the first step."""
        trained = [at for at in self.validation if at.step > 0]
        return trained[-1] if trained else None

    @property
    def final_val_loss(self) -> float | None:
        """The loss of the last validation of trained weights; None if there is none."""
        return None if self.final_validation is None else self.final_validation.val_loss

    @property
    def seed(self) -> int:
        """The seed of the weights and of the token order; 0 if unknown."""
        seed = self.setting("training", "seed")
        return seed if isinstance(seed, int) else 0

    @property
    def planned_steps(self) -> int | None:
        """The number of steps planned for the run; None if its config.toml is missing."""
        steps = self.setting("training", "steps")
        return steps if isinstance(steps, int) else None

    @property
    def step(self) -> int:
        """The last recorded step; 0 for none."""
        return max((found[-1].step for found in (self.steps, self.validation) if found), default=0)

    @property
    def is_at_work(self) -> bool:
        """Whether a process trains it."""
        return self.status in ("running", "silent")

    @property
    def left(self) -> int:
        """The steps that remain; 0 for a run that has ended."""
        return 0 if self.status in ENDED else max(0, (self.planned_steps or 0) - self.step)

    @property
    def pace_s(self) -> float | None:
        """The median time of the last steps; None if it is unknown."""
        found = finite(self.steps[-PACE_STEPS:], "step_ms")
        return statistics.median(found) / 1000 if found else None

    @property
    def seconds_left(self) -> float | None:
        """Time in steps until the end of a running run, at the pace of its last steps; None if unknown."""
        is_known = self.status == "running" and self.planned_steps and self.pace_s is not None
        return self.left * (self.pace_s or 0.0) if is_known else None

    @property
    def recorded_at(self) -> float:
        """Time of the last record, in seconds since 1970; 0 without one."""
        try:
            return (self.path / METRICS).stat().st_mtime if self.step or self.events else 0.0
        except OSError:  # removed meanwhile
            return 0.0

    @property
    def guarded(self) -> list[Mapping[str, Any]]:
        """The events of the guard."""
        return [event for event in self.events if event["event"] in GUARD]

    @property
    def tokens_per_s(self) -> float | None:
        """Median speed after the first steps, over all ranks together."""
        return self._median("tokens_per_s")

    @property
    def mfu(self) -> float | None:
        """Median share of the peak described by the fact `peak_source`; None if no peak is known."""
        return self._median("mfu")

    @property
    def peak_memory_bytes(self) -> int | None:
        """The largest memory of any step."""
        sizes = finite(self.steps, "memory_bytes")
        return int(max(sizes)) if sizes else None

    @property
    def samples(self) -> list[tuple[str, str]]:
        """(prompt, text) of each sample that the run wrote at its end."""
        samples = [event for event in self.events if event.get("sample") is not None]
        return [(str(event.get("prompt") or ""), str(event["sample"])) for event in samples]

    def count(self, event_type: str) -> int:
        """The number of recorded events of a type ("save", "skip", "resume", ...)."""
        return sum(event["event"] == event_type for event in self.events)

    def last_event(self, name: str, kind: type[Stored]) -> Stored | None:
        """The last complete event of a name; None without any."""
        for event in reversed(self.events):
            if event["event"] == name:
                with suppress(ValueError):
                    return kind.model_validate(event)
        return None

    def _median(self, name: str) -> float | None:
        found = finite(self.steps[WARMUP_STEPS:] or self.steps, name)
        return statistics.median(found) if found else None


def read_run(path: Path | str, tail: int = 0) -> Run:
    """Read one run directory.

    With a `tail`, only so many bytes at the end of the metrics, and neither gauges nor results of tools.

    Raises:
        UserError: `path` holds neither config.toml nor metrics.jsonl, or config.toml is not valid TOML.
    """
    path = Path(path)
    if not any((path / file).is_file() for file in (CONFIG, METRICS)):
        problem = "holds neither of them" if path.is_dir() else "is not a directory"
        raise UserError(
            f"{str(path)!r} is not a run: a run directory holds {CONFIG} and {METRICS}, and this {problem}; "
            f"give the directory that `narrowgauge train --out` wrote"
        )
    of_steps, events, ignored = records.read_metrics(path / METRICS, tail)
    steps, validation = records.steps_and_validations(of_steps)
    config, (status, reason) = records.read_config(path / CONFIG), read_state(path)
    run = Run(path.resolve().name, path, config, steps, validation, events, status, reason, ignored)
    if tail:
        return run
    return replace(
        run,
        gauges=records.read_gauges(path / "gauges.jsonl"),
        probe=read_stored(Probe, path / "probe.json"),
        costs=read_stored(Costs, path / "sensitivity.json"),
        recipe_text=records.read_text(path / "recipe.toml"),
    )


def read_state(path: Path) -> tuple[RunState, str]:
    """The state of a run, and why; unknown if its status.json is missing or torn."""
    try:
        said = json.loads((path / STATUS).read_bytes())
        word, reason = "diverged" if said.get("diverged") else said["status"], str(said.get("reason") or "")
    except (OSError, ValueError, KeyError, AttributeError):
        return "unknown", ""
    if word == "running" and is_abandoned(path):
        return "killed", "no process holds it; the same line again continues it"
    return next((known for known in get_args(RunState) if known == word), "unknown"), reason


def read_runs(paths: Iterable[Path | str]) -> list[Run]:
    """Read several run directories; equal names get enough parent directories to make them distinct."""
    runs = [read_run(path) for path in dict.fromkeys(Path(path).resolve() for path in paths)]
    if not runs:
        raise UserError(
            "a report needs at least one run; give a directory that `narrowgauge train --out` wrote"
        )
    return with_distinct_names(runs)


def with_distinct_names(runs: Sequence[Run]) -> list[Run]:
    """The runs; those with equal names get enough parent directories to make them distinct."""
    runs = list(runs)
    for depth in range(2, max((len(run.path.parts) for run in runs), default=0) + 1):
        names = [run.name for run in runs]
        if len(set(names)) == len(names):
            break
        runs = [
            replace(run, name="/".join(run.path.parts[-depth:])) if names.count(run.name) > 1 else run
            for run in runs
        ]
    return runs


DEEPEST = 3  # runs/compare-debug/fp8 is two below runs
_TAIL = 1 << 20  # bytes of metrics that are read: some thousand steps
_SILENT_S, _SILENT_STEPS = 120.0, 20.0  # silent: longer than both, the latter in steps


def list_runs(folder: Path) -> list[Run]:
    """Every run in a folder and its subfolders, as far as it is; sorted by path."""
    return [look_at(path) for path in folders(folder, is_run)]


def folders(folder: Path, is_wanted: Callable[[Path], bool], depth: int = DEEPEST) -> Iterator[Path]:
    """A folder, or those up to three levels below it that are wanted, by name; none lies in another."""
    if is_wanted(folder):
        yield folder
    elif depth:
        try:
            inside = sorted(Path(entry) for entry in os.scandir(folder) if entry.is_dir())
        except OSError:
            return
        for path in inside:
            yield from folders(path, is_wanted, depth - 1)


def is_run(path: Path) -> bool:
    """Whether a directory looks like a run."""
    return any(os.path.exists(path / name) for name in (CONFIG, METRICS, STATUS, "checkpoints"))


def look_at(path: Path) -> Run:
    """The run in a directory with its last steps; it is broken if its files cannot be read."""
    try:
        run = read_run(path, _TAIL)
    except (UserError, OSError) as error:
        return Run(path.name, path, status="broken", reason=str(error))
    return with_silence(run) if run.config else replace(run, status="broken", reason=f"it has no {CONFIG}")


def with_silence(run: Run) -> Run:
    """The run; silent if it is running and has recorded nothing for much longer than its steps take."""
    longest = max(_SILENT_S, _SILENT_STEPS * (run.pace_s or float("inf")))
    is_silent = run.status == "running" and time.time() - run.recorded_at > longest
    return replace(run, status="silent") if is_silent else run


def as_json(run: Run) -> dict[str, Any]:
    """How far a run is; a loss is NaN without any, and that of validation may be of untrained weights."""
    return {
        "name": run.name,
        "state": run.status,
        "reason": run.reason,
        "step": run.step,
        "steps": run.planned_steps or 0,
        "loss": run.steps[-1].loss if run.steps else math.nan,
        "val_loss": run.validation[-1].val_loss if run.validation else math.nan,
        "recipe": run.recipe,
        "path": str(run.path),
        "tokens_per_s": run.tokens_per_s,
        "memory_bytes": run.peak_memory_bytes,
        "seconds_left": run.seconds_left,
        "recorded_at": run.recorded_at,
        "guard": run.guarded,
    }
