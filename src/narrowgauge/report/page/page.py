"""One self-contained HTML page for one run or several.

The page needs no network and no server. `sections` writes its text as HTML; `curves` writes the curves as
JSON, which the page's script draws. The templates are in `web/`. Run names, settings and samples are
untrusted, so there are three protections: text is escaped, the JSON cannot close its script element, and a
content security policy admits only the page's script, by its hash.
"""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from narrowgauge.errors import UserError
from narrowgauge.files import make_directory, write_whole
from narrowgauge.report.page import sections
from narrowgauge.report.page.analysis import analysis
from narrowgauge.report.page.audit import audit
from narrowgauge.report.page.curves import page_data
from narrowgauge.report.page.events import events
from narrowgauge.report.page.gauges import gauges, heat_data
from narrowgauge.report.page.memory import memory
from narrowgauge.report.page.origin import origin
from narrowgauge.report.page.reproduce import reproduce
from narrowgauge.report.page.standing import standing
from narrowgauge.report.page.step_time import step_time
from narrowgauge.report.read.progress import ENDED, read_progress
from narrowgauge.report.read.run import Run, read_runs

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


def write_report(runs: Sequence[Path | str], out: Path | str, command: str = "", more: str = "") -> Path:
    """Read the run directories, write their page atomically to the file `out`, and return its path.

    Missing parent directories are created. The first run's variant is the reference of every gap. `command`
    is the command line of a comparison; the page of a single run shows the run's. `more` is HTML that follows
    the charts: sections of an experiment. If a run has not ended, the page shows how far each is.

    Raises:
        UserError: a path is not a run directory, or `out` cannot be written.
    """
    read = read_runs(runs)
    found = [read_progress(run.path, time.time(), run.name) for run in read]
    is_open = any(one.state not in (*ENDED, "unknown") for one in found)
    html = render_report(read, command, more, standing(found, is_compared=len(read) > 1) if is_open else "")
    return write_page(html, Path(out))


def write_page(html: str, out: Path) -> Path:
    """Write a page atomically to the file `out`, whose parent directories are created, and return its path.

    Raises:
        UserError: `out` cannot be written.
    """
    try:
        if out.is_dir():
            raise UserError(f"{str(out)!r} is a directory, but a report is a file: try {out / 'report.html'}")
        make_directory(out.parent)
        write_whole(out, html)
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r} ({error.strerror}); choose another --out") from error
    return out


def render_report(
    runs: Sequence[Run], command: str = "", more: str = "", where: str = "", is_live: bool = False
) -> str:
    """The page as a string of ASCII HTML, under 5 MB for runs of any length.

    Args:
        runs: The runs, the reference first.
        command: As in `write_report`.
        more: As in `write_report`.
        where: HTML of where the runs stand, which comes first (`page.standing`).
        is_live: Whether the page is written again while the runs train, so that it loads itself again.
    """
    script = "\n".join(map(_template, SCRIPTS + (("live.js",) if is_live else ())))
    has_curves = any(run.steps or run.validation for run in runs)
    page = Template(_template("page.html")).substitute(
        _parts(runs, command),
        live=_LIVE.format(datetime.now(UTC)) if is_live else "",
        standing=where,
        charts=_template("charts.html") if has_curves else _NO_CURVES,
        more=more,
        gauges=gauges(runs, _template("heat.html")),
        style=_template("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_json_in_html({**page_data(runs), "gauges": heat_data(runs)}),
    )
    return page.encode("ascii", "xmlcharrefreplace").decode()


def _parts(runs: Sequence[Run], command: str) -> dict[str, str]:
    """The parts of the page that are text."""
    return {
        "title": escape(sections.title(runs)),
        "lead": sections.lead(runs),
        "origin": origin(runs, command),
        "losses": "Loss" if len(runs) == 1 else "Loss and gap",
        "table": sections.table(runs),
        "memory": memory(runs),
        "events": events(runs),
        "step_time": step_time(runs),
        "analysis": analysis(runs),
        "audit": audit(runs),
        "samples": sections.samples(runs),
        "configuration": sections.configuration(runs),
        "reproduce": reproduce(runs),
    }


_LIVE = ' &#183; <time id="live" datetime="{:%Y-%m-%dT%H:%M:%SZ}">live</time>'
_NO_CURVES = '<p class="empty">There are no curves yet: no step has been recorded.</p>'


def _json_in_html(value: object) -> str:
    """JSON that is inert inside a script element: without `<` it can neither close nor open one."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _template(name: str) -> str:
    return resources.files("narrowgauge.report.page").joinpath("web", name).read_text("ascii").strip()
