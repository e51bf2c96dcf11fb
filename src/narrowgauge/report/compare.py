"""The same model, the same tokens in the same order, under several recipes.

Each recipe trains in a process of its own, started with the ordinary `train` on a configuration file, so
that its peak memory is its own and a comparison that was stopped goes on where it was: finished runs are
found done, a stopped one continues.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from narrowgauge.checkpoint import make_directory, write_whole
from narrowgauge.errors import UserError
from narrowgauge.training import Config, to_toml


class ComparisonFailed(Exception):
    """A recipe's run did not end well; `code` is its exit code."""

    def __init__(self, recipe: str, code: int) -> None:
        super().__init__(f"the run of recipe {recipe!r} ended with exit code {code}")
        self.code = code


def compare(configs: Sequence[Config], out: Path, console: Console) -> list[Path]:
    """Train every configuration into `out/RECIPE`; returns the run directories in order.

    Raises:
        UserError: fewer than two recipes, one named twice, or a directory that cannot be written.
        ComparisonFailed: a run failed or was preempted.
    """
    names = [Path(c.recipe.name).stem for c in configs]
    if len(names) < 2:
        raise UserError(f"--recipes {','.join(names)}: a comparison needs at least two, such as bf16,fp8")
    if twice := {n for n in names if names.count(n) > 1}:
        raise UserError(f"--recipes names {min(twice)!r} twice; each recipe gets one run directory")
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
        code = subprocess.run(command, check=False).returncode
        if code:
            raise ComparisonFailed(name, code)
        runs.append(path)
    return runs
