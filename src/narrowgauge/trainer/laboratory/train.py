"""Trains a run from Python or from the command line, writes its page, and returns it as a result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

from narrowgauge.recipes import RecipeLike
from narrowgauge.system.errors import UserError, checked
from narrowgauge.system.result import Result, Row
from narrowgauge.system.signals import Preempted, is_compared
from narrowgauge.trainer import distributed, report, runs, training  # each name is imported when it is used
from narrowgauge.trainer.laboratory import arguments as given
from narrowgauge.trainer.laboratory.arguments import Form, Section, Values, config_of, over, values_of
from narrowgauge.trainer.laboratory.chart import curves
from narrowgauge.trainer.runs.choices import PROFILED


class Training(Result):
    """A run: its directory, and what it recorded.

    Attributes:
        path: The run directory.
        report: The run's page.
    """

    def __init__(self, path: Path) -> None:
        """Read a run directory."""
        self.path, self.report = path, path / "report.html"
        self.run: report.Run = report.read_run(path)

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

    def show(self, console: given.Console) -> None:
        """Print the run as `train` does."""
        report.print_comparison([self.run], console)

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
    allow_change: Annotated[Sequence[str], given.NAMES, Form("KEY,...")] = (),
    profile: Annotated[given.Count, Form("STEPS", bare=PROFILED)] = 0,
    branch: Annotated[str | None, Form("RUN[@STEP]")] = None,
    watch: Annotated[bool, Form()] = False,
    line: given.Line | None = None,
    console: given.Console = None,
    say: given.Say | None = None,
    **sections: Section,
) -> Training:
    """Train a model, or continue a run that stopped.

        ng.train(recipe="mxfp8", out="runs/mine", model="debug", training={"steps": 200})

        narrowgauge train my.toml --steps 2000 --lr 1e-3 --out runs/mine
        narrowgauge train --model gpt2-124m --data my-texts/ --recipe nvfp4 --seq-len 1024
        narrowgauge train --recipe mxfp4 --recipe.fprop.x '{cast = "fp4-row", outliers = 0.99}'
        torchrun --standalone --nproc-per-node 2 -m narrowgauge train --parallel.tensor 2

    Args:
        recipe: A recipe's name, path, dictionary, or a `Recipe`; None for the default.
        out: The run directory; None for one that is named after what differs from the defaults.
        backend: "auto", "native" or "emulated".
        quiet: Whether to print nothing.
        allow_change: Allow these keys to differ from the run in --out.
        profile: Profile STEPS steps (3) into DIR/profile, for Perfetto.
        branch: Begin at a checkpoint of RUN (the newest).
        watch: Show a live page meanwhile (narrowgauge watch).
        line: A command line in place of the sections, the recipe and `out`.
        console: Receives the progress; None for the terminal.
        say: Called with the lines about pages.
        sections: Sections of the configuration as dictionaries, named as in TOML (`model`, `data`, ...);
            `steps`, `seed` and `device` are short for the keys of `training`.

    Returns:
        The run, whose `report` is a page on disk.

    Raises:
        UserError: The configuration, the data or the directory are invalid; nothing was trained.
        Preempted: A signal stopped the run, and its state is saved.
        Diverged: More steps were skipped than `guard.max_skips` allows.
    """
    from rich.console import Console

    from narrowgauge.trainer.laboratory.watch import watched_by_another

    names, say = given.key_names(), say or (lambda text: None)
    allowed = [names.get(key, key) for key in allow_change]
    begin, values = _branch(branch) if branch else None, values_of(line, sections)
    if begin is not None and not (line and line.config):
        values = _on_trunk(values, begin[0], say)
    config = config_of(values, recipe, backend, None if recipe is None else _beside(recipe, out))
    console = console or Console(quiet=quiet)
    path = runs.default_out(config, allowed) if out is None else Path(out)
    if begin is not None and not (path / "config.toml").exists():
        runs.branch_run(*begin, config, path)
    is_first = not distributed.world_from(os.environ, 0).rank  # rank 0 reports for all
    with watched_by_another(path, say) if watch and is_first else nullcontext():
        try:
            runs.run(config, path, console, allowed, profile)
        except (training.Diverged, Preempted):  # also results: the page shows how it happened, or how far
            if is_first:  # a page may be missing, a saved state not
                with suppress(KeyboardInterrupt, UserError, OSError):
                    _report(path, say)
            raise
    if is_first:
        if not is_compared():
            report.print_comparison([report.read_run(path)], console)
        _report(path, say)
    return Training(path)


def _beside(recipe: RecipeLike, out: str | Path | None) -> Path:
    """The file of a recipe that has neither a name nor a file: it is kept next to its run."""
    if out is None and not isinstance(recipe, str | Path):
        raise UserError(
            "train with a recipe that has neither a name nor a file needs out, because its file is kept "
            "next to it; give out='runs/NAME'"
        )
    return Path(out or "runs").with_name(f"{Path(out or 'runs').name}.recipe.toml")


def _branch(text: str) -> tuple[Path, int | None]:
    """Run directory and step of `--branch RUN[@STEP]`; None for its newest checkpoint."""
    run, _, step = text.rpartition("@")
    if distributed.world_from(os.environ, 0).size > 1:
        raise UserError("--branch makes a run directory in one process; start it once without the launcher")
    if Path(text).is_dir() or not run:
        return Path(text), None
    if not step.isdecimal():
        raise UserError(f"--branch {text}: write RUN or RUN@STEP, as in runs/long@256")
    return Path(run), int(step)


def _on_trunk(own: Values, trunk: Path, say: given.Say) -> Values:
    """The values of a run that branches off another without a file of its own: over those of its trunk."""
    from narrowgauge.trainer.runs.use.branch import OFFLOAD

    values = over(training.load_values(trunk / "config.toml"), own)
    if "name" in (recipe := own.get("recipe", {})):  # keys that were set over the trunk's recipe
        left = [key for key in values["recipe"] if key not in ("backend", OFFLOAD, *recipe)]
        for key in left:
            del values["recipe"][key]
        if left:
            say(f"left out: recipe.{', recipe.'.join(left)}, set over the trunk's recipe")
    return values


def _report(path: Path, say: given.Say) -> None:
    """Write the page of a run, and say its path, unless `compare` shows the run."""
    page = report.write_report([path], path / "report.html")
    if not is_compared():
        say(f"report: {page}")
