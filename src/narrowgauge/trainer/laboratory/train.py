"""Trains a run from Python or from the command line, writes its page, and returns it as a result."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from narrowgauge.recipes import RecipeLike
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.result import Result, Row
from narrowgauge.system.signals import Preempted, is_compared
from narrowgauge.trainer.distributed import world_from
from narrowgauge.trainer.laboratory.chart import curves
from narrowgauge.trainer.laboratory.settings import Section, recipe_name, values_of
from narrowgauge.trainer.laboratory.watch import watched_by_another
from narrowgauge.trainer.report import Run, print_comparison, read_run, write_report
from narrowgauge.trainer.runs import branch_run, default_out, run
from narrowgauge.trainer.training import Config, Diverged, make_config


class Training(Result):
    """A run: its directory, and what it recorded.

    Attributes:
        path: The run directory.
        report: The run's page.
    """

    def __init__(self, path: Path) -> None:
        """Read a run directory."""
        self.path, self.report = path, path / "report.html"
        self.run: Run = read_run(path)

    @property
    def losses(self) -> list[float]:
        """The training loss of each step, in nats a token."""
        return [step.loss for step in self.run.steps]

    @property
    def loss(self) -> float | None:
        """The last validation loss in nats a token; without one, the mean of the last training losses."""
        found = self.run.final_val_loss
        return self.run.final_train_loss if found is None else found

    def __repr__(self) -> str:
        loss = "no step yet" if self.loss is None else f"loss {self.loss:.4f}"
        steps = f"{len(self.run.steps):,} steps"
        return f"<Training {self.path}: {self.run.recipe}, {steps}, {loss}, {self.run.status}>"

    def rows(self) -> list[Row]:
        """A row for each step: step, tokens, loss, validation loss where there is one, lr, norm, tokens/s."""
        validated = {at.step: at.val_loss for at in self.run.validation}
        return [
            {
                "step": s.step,
                "tokens": s.tokens,
                "loss": s.loss,
                "val_loss": validated.get(s.step),
                "lr": s.lr,
                "grad_norm": s.grad_norm,
                "tokens_per_s": s.tokens_per_s,
            }
            for s in self.run.steps
        ]

    def as_json(self) -> dict[str, Any]:
        """The run's facts and steps."""
        facts = {"path": str(self.path), "recipe": self.run.recipe, "status": self.run.status}
        return {**facts, "loss": self.loss, "steps": self.rows()}

    def show(self, console: Console) -> None:
        """Print the run as `train` does."""
        print_comparison([self.run], console)

    def plot(self) -> str:
        """The loss over the steps."""
        series = {"training": [(s.step, s.loss) for s in self.run.steps]}
        series["validation"] = [(at.step, at.val_loss) for at in self.run.validation]
        return curves(series, self.run.name, "step", "loss, nats a token")


@checked
def train(
    recipe: RecipeLike | None = None,
    out: str | Path | None = None,
    *,
    backend: str = "auto",
    quiet: bool = False,
    **sections: Section,
) -> Training:
    """Train a model, or continue a run that stopped, as `narrowgauge train` does.

        ng.train(recipe="mxfp8", out="runs/mine", model="debug", training={"steps": 200})

    Args:
        recipe: A recipe's name, path, dictionary, or a `Recipe`; None for the default.
        out: The run directory; None for one that is named after what differs from the defaults.
        backend: "auto", "native" or "emulated".
        quiet: Whether to print nothing.
        sections: Sections of the configuration as dictionaries, named as in TOML (`model`, `data`, ...);
            `steps`, `seed` and `device` are short for the keys of `training`.

    Returns:
        The run, whose `report` is a page on disk.

    Raises:
        UserError: The configuration, the data or the directory are invalid; nothing was trained.
        Preempted: A signal stopped the run, and its state is saved.
        Diverged: More steps were skipped than `guard.max_skips` allows.
    """
    values = values_of(sections)
    if recipe is not None:
        if not isinstance(recipe, str | Path) and out is None:
            raise UserError(
                "train with a recipe that has neither a name nor a file needs out, because "
                "its file is kept next to it; give out='runs/NAME'"
            )
        beside = Path(out or "runs").with_name(f"{Path(out or 'runs').name}.recipe.toml")
        values["recipe"] = {"name": recipe_name(recipe, beside)}
    if backend != "auto":
        values["recipe"] = {**values.get("recipe", {}), "backend": backend}
    config = make_config(values)
    return train_config(config, None if out is None else Path(out), Console(quiet=quiet))


def train_config(
    config: Config,
    out: Path | None,
    console: Console,
    allowed: Sequence[str] = (),
    profile: int = 0,
    branch: tuple[Path, int | None] | None = None,
    say: Callable[[str], object] = lambda text: None,
    is_watched: bool = False,
) -> Training:
    """Train the run of a configuration; the first rank writes its page.

    Args:
        config: The configuration.
        out: The run directory; None for `default_out`.
        console: Receives the progress.
        allowed: Keys whose values may differ from the existing run.
        profile: Steps to profile; 0 for none.
        branch: The run directory and the step from which the run continues.
        say: Called with the lines about pages.
        is_watched: Whether another process shows the run on a live page meanwhile.
    """
    if branch is not None:
        out = out or default_out(config, allowed)
        if not (out / "config.toml").exists():
            branch_run(*branch, config, out)
    is_first = not world_from(os.environ, 0).rank  # rank 0 reports for all
    directory = out or default_out(config, allowed)
    with watched_by_another(directory, say) if is_watched and is_first else nullcontext():
        try:
            path = run(config, out, console, allowed, profile)
        except (Diverged, Preempted):  # also results: the page shows how it happened, or how far it came
            if is_first:
                with suppress(
                    KeyboardInterrupt, UserError, OSError
                ):  # a page may be missing, a saved state not
                    _report(directory, say)
            raise
        return _finished(path, is_first, console, say)


def _finished(path: Path, is_first: bool, console: Console, say: Callable[[str], object]) -> Training:
    """Report a run that is done."""
    if is_first:
        if not is_compared():
            print_comparison([read_run(path)], console)
        _report(path, say)
    return Training(path)


def _report(path: Path, say: Callable[[str], object]) -> None:
    """Write the page of a run, and say its path, unless `compare` shows the run."""
    report = write_report([path], path / "report.html")
    if not is_compared():
        say(f"report: {report}")
