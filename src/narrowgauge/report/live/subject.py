"""What a path holds: a run, a comparison, or a folder of both.

    a run           holds config.toml or metrics.jsonl, or is yet to be made
    a comparison    a folder of runs with the files of `compare`; or several runs that are named together
    a folder        holds runs and comparisons, up to three levels below it

A comparison of an older version has no list of its runs: they are taken in the order in which they started,
so the reference comes first.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.checkpoint import is_abandoned
from narrowgauge.report.read.comparison import COMPARISON, PlannedComparison, read_comparison
from narrowgauge.report.read.listing import DEEPEST, is_run
from narrowgauge.report.read.records import parse_line
from narrowgauge.report.read.run import CONFIG, GAUGES, METRICS, PROBE, RECIPE, SENSITIVITY, STATUS

REPORT, ROWS = "report.html", "runs.csv"
_OF_RUN = (CONFIG, RECIPE, METRICS, GAUGES, STATUS, PROBE, SENSITIVITY)
_OF_COMPARISON = (COMPARISON, ROWS, PROBE)


@dataclass(frozen=True, slots=True)
class Subject:
    """A run or a comparison.

    Attributes:
        name: What a list calls it.
        paths: The directories of its runs that exist, the reference first.
        folder: The folder of a comparison; None for a run and for runs that were named together.
        planned: The plan of the comparison; None if it is unknown.
    """

    name: str
    paths: tuple[Path, ...]
    folder: Path | None = None
    planned: PlannedComparison | None = None

    @property
    def is_compared(self) -> bool:
        """Whether it is a comparison."""
        return self.folder is not None or len(self.paths) > 1

    @property
    def key(self) -> str:
        """Its address: it depends on the path alone, and does not reveal it."""
        return hashlib.sha256(str(self.folder or self.paths[0]).encode()).hexdigest()[:12]

    @property
    def all_paths(self) -> tuple[Path, ...]:
        """The directories of all its runs, also of those that are planned."""
        if self.folder is None or self.planned is None:
            return self.paths
        return tuple(self.folder / run.name for run in self.planned.runs)

    def ends(self) -> tuple[object, ...]:
        """What changes when a run begins or ends."""
        runs = [(path, is_abandoned(path), _stamp(path / STATUS)) for path in self.all_paths]
        return *runs, *self._rows()

    def state(self, now: float) -> str:
        """A digest that changes whenever a file of it does, a process that holds a run ends, or is silent."""
        parts: list[object] = [self.name, self.paths, *(state_of_run(path, now) for path in self.all_paths)]
        if self.folder is not None:
            parts += [_stamp(self.folder / name) for name in _OF_COMPARISON]
        parts += self._rows()
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _rows(self) -> list[object]:
        """What changes with the results of runs that ended, here or on another machine."""
        return [_stamp(Path(self.planned.rows))] if self.planned is not None and self.planned.rows else []


def state_of_run(path: Path, now: float) -> tuple[object, ...]:
    """What changes with the files of a run, the end of its process, and each doubling of its silence."""
    stamps = [_stamp(path / name) for name in _OF_RUN]
    silence_s = now - max(stamps)[0] / 1e9
    return str(path), is_abandoned(path), int(math.log2(max(1.0, silence_s / 60))), *stamps


def subjects(paths: Sequence[Path]) -> tuple[list[Subject], bool]:
    """What some paths hold, and whether it is one subject, which needs no list.

    Several paths are runs of one comparison, the first its reference.
    """
    if len(paths) > 1:
        begun = tuple(path for path in paths if is_run(path))
        return ([Subject(f"{len(paths)} runs", begun)] if begun[:1] == tuple(paths[:1]) else []), True
    (path,) = paths
    if is_run(path):
        return [Subject(path.resolve().name, (path,))], True
    if (one := _comparison(path)) is not None:
        return [one], True
    return list(_inside(path, path, DEEPEST)), not path.is_dir()


def _inside(folder: Path, root: Path, depth: int) -> Iterator[Subject]:
    """The subjects below a folder, by name."""
    for path in _folders(folder):
        name = str(path.relative_to(root))
        if is_run(path):
            yield Subject(name, (path,))
        elif (one := _comparison(path)) is not None:
            yield Subject(name, one.paths, one.folder, one.planned)
        elif depth > 1:
            yield from _inside(path, root, depth - 1)


def _comparison(folder: Path) -> Subject | None:
    """The comparison in a folder; None if it holds none."""
    name = folder.resolve().name
    planned = read_comparison(folder)
    if planned is not None:
        begun = tuple(path for run in planned.compared if is_run(path := folder / run.name))
        is_known = begun[:1] == (folder / planned.compared[0].name,) if planned.compared else False
        return Subject(name, begun if is_known else (), folder, planned)
    if not any((folder / file).is_file() for file in (REPORT, ROWS)):
        return None
    runs = [path for path in _folders(folder) if is_run(path)]
    return Subject(name, tuple(sorted(runs, key=_begun)), folder) if runs else None


def _begun(run: Path) -> str:
    """The time at which a run began, as text that sorts; its name follows, for those without a time."""
    try:
        with (run / METRICS).open("rb") as file:
            line = parse_line(file.readline(1 << 16)) or {}
    except OSError:
        line = {}
    return f"{line.get('time', '~')} {run.name}"


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(Path(entry) for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return []


def _stamp(path: Path) -> tuple[int, int]:
    """Time and size of a file; zeros without one."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
