"""The same model, the same tokens in the same order, under several recipes, settings and seeds.

Each point (`variants`) trains in a process of its own, started with the ordinary `train` on a configuration
file, so that its peak memory is its own and a comparison that was stopped goes on where it was: finished runs
are found done, a stopped one continues.

Where several processes were started (torchrun, srun), each of them starts its own for every point, and these
are the ranks of the run. They meet under the point's name, since a launcher's store outlives a run.
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
from narrowgauge.report.compare.grid import Point
from narrowgauge.training import to_toml


class ComparisonFailed(Exception):
    """A run of a comparison did not end well: `code` is its exit code, negative where a signal killed it."""

    def __init__(self, name: str, code: int) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"the run {name!r} {how}; the same line continues")
        self.code = code


def compare(points: Sequence[Point], out: Path, console: Console, rank: int = 0) -> list[Path]:
    """Train every point into `out/NAME`; returns the run directories in order.

    Args:
        points: of `variants.points`.
        out: the directory of the comparison.
        console: of this process.
        rank: of this process among those that a launcher started; only 0 writes here.

    Raises:
        UserError: a directory that cannot be written.
        ComparisonFailed: a run failed or was preempted.
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
            if code := _run_to_its_end(command, {**os.environ, RENDEZVOUS: point.name}):
                raise ComparisonFailed(point.name, code)
            runs.append(path)
    return runs


def _run_to_its_end(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of a run in a process of its own; negative: the signal that killed it.

    What asks this process to stop is passed on, and the run saves. Ctrl-C reaches every process of a
    terminal without us; passed on, it would be a second one, and that stops a run at once.
    """
    with subprocess.Popen(command, env=environment) as process:

        def pass_on(number: int, frame: FrameType | None) -> None:
            process.send_signal(number)

        handlers = {signal.SIGTERM: pass_on, signal.SIGUSR1: pass_on, signal.SIGINT: lambda *_: None}
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            code = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    return code
