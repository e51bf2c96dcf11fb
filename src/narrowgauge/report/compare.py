"""The same model, the same tokens in the same order, under several recipes.

Each recipe trains in a process of its own, started with the ordinary `train` on a configuration file, so
that its peak memory is its own and a comparison that was stopped goes on where it was: finished runs are
found done, a stopped one continues.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from narrowgauge.checkpoint import make_directory, write_whole
from narrowgauge.errors import UserError
from narrowgauge.training import Config, to_toml


class ComparisonFailed(Exception):
    """A recipe's run did not end well: `code` is its exit code, negative where a signal killed it."""

    def __init__(self, recipe: str, code: int) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"the run of recipe {recipe!r} {how}; the same line continues")
        self.code = code


def compare(configs: Sequence[Config], out: Path | None, console: Console) -> list[Path]:
    """Train every configuration into `out/RECIPE`; returns the run directories in order.

    `out` is runs/compare-MODEL where it is None.

    Raises:
        UserError: fewer than two recipes, one named twice, or a directory that cannot be written.
        ComparisonFailed: a run failed or was preempted.
    """
    names = [Path(c.recipe.name).stem for c in configs]
    if len(names) < 2:
        raise UserError(f"--recipes {','.join(names)}: a comparison needs at least two, such as bf16,fp8")
    if twice := {n for n in names if names.count(n) > 1}:
        raise UserError(f"--recipes names {min(twice)!r} twice; each recipe gets one run directory")
    out = out or Path("runs") / f"compare-{configs[0].model.name}"
    runs = []
    for number, (name, config) in enumerate(zip(names, configs, strict=True), start=1):
        console.print(f"\n{number}/{len(names)}  {name}", style="bold", highlight=False)
        path, file = out / name, out / f"{name}.toml"
        try:
            make_directory(out)
            write_whole(file, to_toml(config))
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror}; name another with --out") from None
        command = [sys.executable, "-m", "narrowgauge", "train", str(file), "--out", str(path)]
        if code := _run_to_its_end(command):
            raise ComparisonFailed(name, code)
        runs.append(path)
    return runs


def _run_to_its_end(command: Sequence[str]) -> int:
    """The exit code of a run in a process of its own; negative: the signal that killed it.

    What asks this process to stop is passed on, and the run saves. Ctrl-C reaches every process of a
    terminal without us; passed on, it would be a second one, and that stops a run at once.
    """
    with subprocess.Popen(command) as process:

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
