"""What a comparison shows so far: its page, its verdicts, and the gap that it will be able to detect.

All of it follows from the plan that `compare` writes before its first run (comparison.json), from the run
directories, and from the rows of a measured experiment. So the process that trains and one that watches make
the same page.
"""

from collections.abc import Sequence

from narrowgauge.trainer.experiment.power import power_text
from narrowgauge.trainer.report.page.html import page
from narrowgauge.trainer.report.page.page import render_report
from narrowgauge.trainer.report.page.rungs import rungs_section
from narrowgauge.trainer.report.page.standing import Subject, read_begun, rows_of, standing
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.read.stored import Probe, read_stored
from narrowgauge.trainer.report.verdict.verdict import Verdict, row_verdicts, verdicts, with_runs


def page_of(one: Subject, states: Sequence[Run], is_live: bool = False, more: str = "") -> str:
    """The page of a run or a comparison; before the first run only where each stands.

    `states` are how far each of its runs is; () leaves that out. `more` is `Markup` for its end.
    """
    runs, planned = read_begun(one.paths), one.planned
    sentences = sight(one, runs)
    section = standing({run.name: [run] for run in states}, sentences, one.is_compared)
    if not runs:
        return page(title=one.name, content=section, reloads=is_live)
    rungs = by_rows(one)
    if planned and (rows := rows_of(one)):
        probe = read_stored(Probe, one.folder / "probe.json")
        more = rungs_section(rows, rungs, planned.parameters, probe) + more
    command = planned.command if planned else ""
    return render_report(runs, command, more, section, is_live, rungs)


def by_rows(one: Subject) -> list[Verdict]:
    """The verdicts on the finished runs of a measured experiment, at each rung; [] for another."""
    if (p := one.planned) is None:
        return []
    return row_verdicts(rows_of(one), p.reference, p.family, p.parameters, is_quiet=p.is_quiet)


def judged(one: Subject, runs: Sequence[Run]) -> list[Verdict]:
    """The verdicts: on the runs, the reference first, and by the rows of a measured experiment."""
    return with_runs(by_rows(one), verdicts(runs) if runs else [])


def sight(one: Subject, runs: Sequence[Run]) -> list[str]:
    """The gap that each rung will be able to detect, given the gaps of the finished runs; [] if unplanned."""
    if (planned := one.planned) is None:
        return []
    of_rung = {run.rung: run for run in planned.runs if run.rung}
    done = [run for run in runs if run.status == "done"]
    found = by_rows(one)
    if not planned.rows and done and done[0] is runs[0]:
        found = verdicts(done)
    sentences = []
    for rung, run in sorted(of_rung.items()):
        gaps = {arm.name: arm.gaps for arm in found if arm.rung == rung}
        seeds, arms = len(planned.seeds), len(planned.family)
        text = power_text(seeds, arms, run.tokens, planned.parameters, gaps, planned.is_quiet)
        sentences.append(f"rung {rung}: {text}" if len(of_rung) > 1 else text)
    return sentences
