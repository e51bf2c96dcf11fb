"""One self-contained HTML page for one run or several.

The page needs no network and no server. Its text is filled into the template `page.html.jinja` (`html`);
`curves` and `gauges` give data that the page's script draws, as JSON that cannot close its script element.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from markupsafe import Markup

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.trainer.report.page import sections
from narrowgauge.trainer.report.page.curves import events, page_data
from narrowgauge.trainer.report.page.gauges import gauges, heat_data, no_gauges
from narrowgauge.trainer.report.page.html import page_with_script, web_file
from narrowgauge.trainer.report.page.measured import analysis, audit, memory, step_time
from narrowgauge.trainer.report.page.reproduce import script
from narrowgauge.trainer.report.page.standing import standing
from narrowgauge.trainer.report.read.run import ENDED, Run, read_runs, with_silence
from narrowgauge.trainer.report.table.sentence import table_notes
from narrowgauge.trainer.report.verdict.verdict import Verdict, verdicts, with_runs

# in the order of their dependencies
SCRIPTS = (
    "marks.js",
    "save.js",
    "draw.js",
    "chart.js",
    "page.js",
    "histogram.js",
    "difference.js",
    "heat.js",
)


def write_report(runs: Sequence[Path | str], out: Path | str, more: str = "") -> Path:
    """Read the run directories, write their page atomically to the file `out`, and return its path.

    Missing parent directories are created. The first run's variant is the reference of every gap. `more` is
    `Markup` that follows the charts. If a run has not ended, the page shows how far each is.

    Raises:
        UserError: a path is not a run directory, or `out` cannot be written.
    """
    read = [with_silence(run) for run in read_runs(runs)]
    is_open = any(run.status not in (*ENDED, "unknown") for run in read)
    where = standing({run.name: [run] for run in read}, is_compared=len(read) > 1) if is_open else ""
    return write_page(render_report(read, more=more, where=where), Path(out))


def write_page(html: str, out: Path) -> Path:
    """Write a page atomically to the file `out`, making its parent directories, and return its path."""
    try:
        if out.is_dir():
            raise UserError(f"{str(out)!r} is a directory, but a report is a file: try {out / 'report.html'}")
        make_directory(out.parent)
        write_whole(out, html)
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r} ({error.strerror}); choose another --out") from error
    return out


def render_report(
    runs: Sequence[Run],
    command: str = "",
    more: str = "",
    where: str = "",
    is_live: bool = False,
    rungs: Sequence[Verdict] = (),
) -> str:
    """The page as a string of ASCII HTML, under 5 MB for runs of any length.

    Args:
        runs: The runs, the reference first.
        command: The command line of a comparison; the page of a single run shows the run's.
        more: `Markup` that follows the charts, such as the sections of an experiment.
        where: `Markup` of where the runs stand, which comes first (`page.standing`).
        is_live: Whether the page is written again while the runs train, so that it loads itself again.
        rungs: The verdicts by the rows of a measured experiment.
    """
    found = with_runs(rungs, verdicts(runs))
    return page_with_script(
        "page",
        "\n".join(map(web_file, SCRIPTS + (("live.js",) if is_live else ()))),
        written=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}" if is_live else "",
        reloads=False,
        data=_json_in_html({**page_data(runs, found), "gauges": heat_data(runs)}),
        runs=runs,
        title=sections.title(runs, found),
        lead=sections.lead(runs, found),
        origin=sections.origin(runs, command),
        where=where,
        has_curves=any(run.steps or run.validation for run in runs),
        events=events(runs),
        more=more,
        no_gauges=no_gauges(runs),
        gauges=gauges(runs),
        analysis=analysis(runs),
        rows=sections.all_runs(runs, found),
        has_seeds=any(len(one.runs) > 1 for one in found),
        notes=table_notes(runs, found),
        memory=memory(runs),
        step_time=step_time(runs),
        samples=sections.samples(runs),
        settings=[sections.settings(run) for run in runs],
        differences=sections.differences(runs),
        audit=audit(runs),
        script=script(runs),
    )


def _json_in_html(value: object) -> Markup:
    """JSON that is inert inside a script element: without `<` it can neither close nor open one."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
