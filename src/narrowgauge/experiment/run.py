"""Trains a ladder, or goes on with it; writes OUT/runs.csv and OUT/report.html as results come in."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from narrowgauge.errors import UserError
from narrowgauge.experiment.design import Ladder
from narrowgauge.experiment.dry_run import arm_speeds, plan_lines, tokens_left
from narrowgauge.experiment.engine import Engine, environment_of
from narrowgauge.experiment.jobs import Job, is_complete, jobs_of, require_same, state_of
from narrowgauge.experiment.power import power_text
from narrowgauge.experiment.probe import probe_arms, read_probe
from narrowgauge.experiment.results import collect_rows
from narrowgauge.experiment.watch import Watch
from narrowgauge.files import make_directory, write_whole
from narrowgauge.models import count_block_weights
from narrowgauge.report.page.rungs import render_page
from narrowgauge.report.table.rungs import print_results
from narrowgauge.report.verdict.rows import rows_text
from narrowgauge.report.verdict.rungs import ArmResult, arm_results


def run_ladder(ladder: Ladder, out: Path, console: Console, is_dry: bool = False) -> None:
    """Say what the plan will see; then train what is left, and show the results.

    Args:
        ladder: The plan.
        out: The directory of its runs.
        console: Where it is shown.
        is_dry: Only say what it will take.

    Raises:
        UserError: the directory cannot be written.
        ComparisonFailed: a run failed, or a signal stopped the ladder; the same line continues.
    """
    for chain in ladder.chains:
        require_same(chain, out)
    for sentence in _sight(ladder, out):
        _say(console, sentence)
    if is_dry:
        speeds = arm_speeds(ladder, out, lambda sentence: _say(console, sentence))
        for line in plan_lines(ladder, out, speeds):
            _say(console, line)
        return
    try:
        make_directory(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; name another with --out") from None
    runs = [run for chain in ladder.chains for run in chain.runs]
    left = sum(tokens_left(chain, out) for chain in ladder.chains)
    done = sum(state_of(out / run.name) != "open" for run in runs)
    with Watch(console, left, len(runs), done) as watch:

        def show(jobs: Sequence[Job], ended: Job | None) -> None:
            watch.show(jobs, ended)
            if ended is not None and not ended.tokens:
                write_results(ladder, out)

        chains = [jobs_of(chain, out) for chain in ladder.chains if not is_complete(chain, out)]
        try:
            Engine(ladder.jobs, environment_of(ladder.threads, ladder.products), show).run(chains)
        finally:
            write_results(ladder, out)
    probe_arms(ladder, out)
    write_results(ladder, out)
    print_results(_results(ladder, out), console)
    _say(console, f"results: {out / 'runs.csv'}")
    _say(console, f"report: {out / 'report.html'}")


def write_results(ladder: Ladder, out: Path) -> None:
    """Write runs.csv and report.html from the runs that are finished."""
    rows = collect_rows(ladder, out)
    write_whole(out / "runs.csv", rows_text(rows))
    if rows:
        parameters = count_block_weights(ladder.chains[0].trunk.config.spec.model)
        page = render_page(rows, parameters, read_probe(out), ladder.arms[0], ladder.family)
        write_whole(out / "report.html", page)


def _results(ladder: Ladder, out: Path) -> list[ArmResult]:
    """The results of the runs that are finished."""
    parameters = count_block_weights(ladder.chains[0].trunk.config.spec.model)
    return arm_results(collect_rows(ladder, out), ladder.arms[0], ladder.family, parameters)


def _sight(ladder: Ladder, out: Path) -> Sequence[str]:
    """Which gap each rung will be able to show."""
    parameters = count_block_weights(ladder.chains[0].trunk.config.spec.model)
    sentences = []
    results = _results(ladder, out)
    for number, run in enumerate(ladder.chains[0].runs, start=1):
        gaps = {result.arm: result.gaps for result in results if result.rung == number}
        text = power_text(len(ladder.seeds), len(ladder.family), run.tokens, parameters, gaps)
        sentences.append(f"rung {number}: {text}")
    return sentences


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
