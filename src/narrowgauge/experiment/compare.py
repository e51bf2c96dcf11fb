"""The same model, the same tokens in the same order, under several recipes, settings and seeds.

Each point (`grid`) trains in a separate process, started with the ordinary `train` on a configuration file.
So the peak memory of a point is measured alone, and a stopped comparison continues: `train` skips a finished
run and resumes a stopped one. Such a run shows its steps and leaves its table and its sample of text to its
directory, because the verdict is what a terminal has room for.

On a CPU all points have one number of threads, since the last digits of losses follow from it: that of the
runs that are there already, else as many as cores are free when the comparison begins.

Under a launcher (torchrun, srun) every launched process starts one child process per point, and the children
are the ranks of the run. The rendezvous uses the point's name, because a launcher's store outlives a run.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from rich.console import Console

from narrowgauge.distributed import RENDEZVOUS
from narrowgauge.errors import UserError
from narrowgauge.experiment.grid import Point
from narrowgauge.files import make_directory, write_whole
from narrowgauge.operating_system import STOP_SIGNALS
from narrowgauge.runs import choose_device
from narrowgauge.runs.monitor.threads import threads_of
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.signals import COMPARED
from narrowgauge.training import to_toml


class ComparisonFailed(Exception):
    """A run of a comparison has no result; `code` is its exit code, negative if a signal killed it."""

    def __init__(self, name: str, code: int) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"the run {name!r} {how}; the same line continues")
        self.code = code


def compare(points: Sequence[Point], out: Path, console: Console, rank: int = 0) -> list[Path]:
    """Train every point into `out/NAME`, and return the run directories in the order of the points.

    `rank` is that of this process under its launcher; only rank 0 writes into `out`. A run that failed by
    itself, such as one that diverged, is a result like any other.

    Raises:
        UserError: a directory cannot be written.
        ComparisonFailed: a run was killed or preempted, or could not begin.
    """
    runs, points = [], with_equal_threads(points, out)
    with ExitStack() as stack:
        files = out if rank == 0 else Path(stack.enter_context(TemporaryDirectory()))
        for number, point in enumerate(points, start=1):
            console.print(f"\n{number}/{len(points)}  {point.name}", style="bold", highlight=False)
            path, file = out / point.name, files / f"{point.name}.toml"
            try:
                make_directory(files)
                write_whole(file, to_toml(point.config))
            except OSError as error:
                raise UserError(
                    f"{out} cannot be written: {error.strerror}; name another with --out"
                ) from None
            command = [sys.executable, "-m", "narrowgauge", "train", str(file), "--out", str(path)]
            code = _run_process(command, {**os.environ, COMPARED: "1", RENDEZVOUS: point.name})
            if code and not (code == 1 and RunDirectory(path).status() == "failed"):
                raise ComparisonFailed(point.name, code)
            runs.append(path)
    return runs


def with_equal_threads(points: Sequence[Point], out: Path) -> list[Point]:
    """The points with `training.threads`, the same in all that do not say it.

    A run that has begun keeps its own. A GPU's numbers do not depend on it.
    """
    runs = {point.name: RunDirectory(out / point.name) for point in points}
    begun = {name: run for name, run in runs.items() if (run.path / "config.toml").is_file()}
    number = next((threads for run in begun.values() if (threads := run.threads())), 0)
    number = number or threads_of([])[0]

    def with_threads(point: Point) -> Point:
        training = point.config.training
        if training.threads or choose_device(training.device).type != "cpu":
            return point
        threads = begun[point.name].config().training.threads if point.name in begun else number
        keys = {"training": training.model_copy(update={"threads": threads})}
        return Point(point.name, point.config.model_copy(update=keys))

    return [with_threads(point) for point in points]


def _run_process(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command as a child process and return its exit code; negative: the signal that killed it.

    SIGTERM and SIGUSR1 are forwarded to the child, so the run saves. Ctrl-C (SIGINT) already reaches every
    process of a terminal; a forwarded one would be the second, and the second stops a run at once.
    """
    with subprocess.Popen(command, env=environment) as process:

        def forward(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        handlers = dict.fromkeys(STOP_SIGNALS, forward) | {signal.SIGINT: lambda *_: None}
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            code = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    return code
