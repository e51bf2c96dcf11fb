"""The same model, the same tokens in the same order, under several recipes, settings and seeds.

Each point (`grid`) trains in a separate process, started with the ordinary `train` on a configuration file.
So the peak memory of a point is measured alone, and a stopped comparison continues: `train` skips a finished
run and resumes a stopped one.

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
from narrowgauge.files import make_directory, write_whole
from narrowgauge.operating_system import STOP_SIGNALS
from narrowgauge.report.compare.grid import Point
from narrowgauge.training import to_toml
from narrowgauge.training.run_directory import RunDirectory


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
    runs = []
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
            code = _run_process(command, {**os.environ, RENDEZVOUS: point.name})
            if code and not (code == 1 and RunDirectory(path).status() == "failed"):
                raise ComparisonFailed(point.name, code)
            runs.append(path)
    return runs


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
