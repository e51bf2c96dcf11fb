"""What a path holds: a run, a comparison, or a folder of both, up to three levels below it.

A comparison is a folder with the plan that `compare` wrote, or several runs that are named together.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.report.read.progress import DEEPEST, is_run
from narrowgauge.report.read.stored import COMPARISON, PlannedComparison, read_stored


@dataclass(frozen=True, slots=True)
class Subject:
    """A run or a comparison.

    Attributes:
        name: What a list calls it.
        folder: Its directory; of runs that are named together, that of the first.
        paths: The directories of its runs that have begun, the reference first.
        planned: The plan of a comparison; None if there is none.
    """

    name: str
    folder: Path
    paths: tuple[Path, ...]
    planned: PlannedComparison | None = None

    @property
    def is_compared(self) -> bool:
        """Whether it is a comparison."""
        return self.planned is not None or len(self.paths) > 1


def subjects(paths: Sequence[Path]) -> tuple[list[Subject], bool]:
    """What some paths hold, and whether it is one subject, which needs no list.

    Several paths are runs of one comparison, the first its reference; without that there is nothing yet.
    """
    first, *others = paths
    if others:
        begun = tuple(filter(is_run, paths))
        return ([Subject(f"{len(paths)} runs", first, begun)] if is_run(first) else []), True
    found = list(_below(first, first, DEEPEST))
    return found, [one.folder for one in found] == [first]


def _below(folder: Path, root: Path, depth: int) -> Iterator[Subject]:
    """The subjects in a folder, by name."""
    name = folder.resolve().name if folder == root else folder.relative_to(root).as_posix()
    if is_run(folder):
        yield Subject(name, folder, (folder,))
    elif (planned := read_stored(PlannedComparison, folder / COMPARISON)) is not None:
        begun = tuple(path for run in planned.compared if is_run(path := folder / run.name))
        has_reference = begun and begun[0].name == planned.compared[0].name
        yield Subject(name, folder, begun if has_reference else (), planned)
    elif depth:
        try:
            inside = sorted(Path(entry) for entry in os.scandir(folder) if entry.is_dir())
        except OSError:
            return
        for path in inside:
            yield from _below(path, root, depth - 1)
