"""One self-contained HTML page for one run or several.

The page needs no network and no server. Its text is filled into the template `page.html.jinja` (`html`);
`curves` and `measured` give data that the page's script draws, as JSON that cannot close its script element.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import make_directory, write_whole
from narrowgauge.system.units import human_duration
from narrowgauge.trainer.report import table
from narrowgauge.trainer.report.page import curves, measured
from narrowgauge.trainer.report.page.html import Table, page, part, text_of, web_file
from narrowgauge.trainer.report.page.reproduce import script
from narrowgauge.trainer.report.page.standing import standing
from narrowgauge.trainer.report.read.records import flatten
from narrowgauge.trainer.report.read.run import ENDED, Run, read_runs, with_silence
from narrowgauge.trainer.report.verdict.expected import Expectation
from narrowgauge.trainer.report.verdict.verdict import Verdict, verdicts, with_runs

_LISTED = 3  # hosts, devices or versions
SCRIPTS = ("marks", "save", "draw", "chart", "page", "histogram", "heat")  # each before its users


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
    sentences = table.summary(runs, found)
    failed = min(table.MOST, sum(run.has_failed for run in runs))  # of the sentences, the first
    scripts = [*SCRIPTS, "live"] if is_live else SCRIPTS
    data = json.dumps(
        curves.page_data(runs, found) | {"gauges": measured.heat_data(runs)},
        separators=(",", ":"),
        allow_nan=False,
    )
    for character in "<>&":  # inert: without them it can neither close nor open an element
        data = data.replace(character, f"\\u{ord(character):04x}")
    return page(
        "page",
        "\n".join(web_file(f"{name}.js") for name in scripts),
        written=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}" if is_live else "",
        data=Markup(data),
        curves=curves,
        measured=measured,
        runs=runs,
        title=_title(runs, found),
        lead=[(text.replace(" %", "\u00a0%"), at < failed) for at, text in enumerate(sentences)],
        origin=_origin(runs, command),
        where=where,
        has_curves=any(run.steps or run.validation for run in runs),
        more=more,
        rows=_all_runs(runs, found),
        has_seeds=any(len(one.runs) > 1 for one in found),
        notes=table.table_notes(runs, found),
        samples=[(run.name, *sample) for run in runs for sample in run.samples[-1:]],
        settings=[_settings(run) for run in runs],
        differences=_differences(runs),
        script=script(runs),
    )


def _title(runs: Sequence[Run], found: Sequence[Verdict]) -> str:
    """The heading."""
    if len(runs) == 1:
        return runs[0].name
    count = sum(bool(one.runs) for one in found)
    if count == len(runs):
        return f"{count} runs compared"
    return (
        f"{len(runs)} runs of one variant" if count == 1 else f"{count} variants compared, {len(runs)} runs"
    )


def _origin(runs: Sequence[Run], command: str) -> dict[str, str]:
    """When, how long, where, with which version and command line the runs were trained, by name.

    Start and resume events record these. What an older run did not record is left out. `command` is the
    command line of a comparison that made the page.
    """
    facts, seconds = [run.facts for run in runs], sum(run.steps[-1].seconds for run in runs if run.steps)
    begun = [times[0] for run in runs if (times := _times(run, "start"))]
    ended = [times[-1] for run in runs if (times := _times(run, "done", "stop"))]
    until = f" to {max(ended):%Y-%m-%d %H:%M}" if len(ended) == len(runs) else ""
    wide = {
        run.recipe: "; ".join(map(str, of["placement"]))
        for run, of in zip(runs, facts, strict=True)
        if of.get("placement")
    }
    found = {
        "date": f"{min(begun):%Y-%m-%d %H:%M}{until} UTC" if begun else "",
        "duration": f"{human_duration(seconds)} in training steps" if seconds else "",
        "host": _listed(facts, host="", device=""),
        "recipe": ". ".join(f"{name}: {layers}" for name, layers in wide.items()),
        "version": _listed(facts, version="narrowgauge ", torch="torch "),
        "command": command or (str(facts[0].get("command") or "") if len(runs) == 1 else ""),
    }
    return {name: text for name, text in found.items() if text}


def _times(run: Run, *names: str) -> list[datetime]:
    """The recorded times of the events with one of these names."""
    found = []
    for event in run.events:
        if event["event"] in names:
            with suppress(ValueError):
                found.append(datetime.fromisoformat(str(event.get("time"))).astimezone(UTC))
    return found


def _listed(facts: Sequence[Mapping[str, Any]], **words: str) -> str:
    """The values of some facts over all runs, each once, after a word."""
    found = [", ".join(f"{word}{of[key]}" for key, word in words.items() if of.get(key)) for of in facts]
    texts = list(dict.fromkeys(filter(None, found)))
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return "; ".join(texts[:_LISTED]) + more


def _all_runs(runs: Sequence[Run], found: Sequence[Verdict]) -> Table:
    """The table of all runs; each variant has its line of the charts before its name."""
    shown = table.table_rows(runs, found)
    key = Markup('<span class="key" data-look="{}"></span>{}')
    rows = [list(row.values()) for row in shown]
    for row, cells in zip(shown, rows, strict=True):
        if (kind := table.kind_of(row)) != table.SEED:
            cells[0] = key.format(kind, cells[0])
    return Table("All runs", list(shown[0]), rows, table.TEXT_COLUMNS)


def _settings(run: Run) -> dict[str, Any]:
    """The configuration and the recorded facts in small tables, the recipe, and the keys set over it."""
    loose = {key: value for key, value in run.config.items() if not isinstance(value, Mapping)}
    sections = {key: value for key, value in run.config.items() if isinstance(value, Mapping)}
    facts = {key.replace("_", " "): value for key, value in run.facts.items()}
    facts |= {"saves": run.count("save"), "resumes": run.count("resume"), "skipped steps": run.count("skip")}
    facts |= {"status": run.status, "reason": run.reason}
    facts = {key: value for key, value in facts.items() if value not in (None, "")}
    named = [("", loose), *sections.items(), ("as it ran", facts)]
    over = {
        key: text
        for key, text in _texts(sections.get("recipe", {})).items()
        if key not in ("name", "backend")
    }
    return {
        "name": run.name,
        "has_config": bool(run.config),
        "cards": [(name, _texts(values)) for name, values in named if values],
        "recipe": run.recipe_text,
        "over": ", ".join(f"{key} = {text}" for key, text in over.items()),
    }


def _differences(runs: Sequence[Run]) -> Table:
    """The settings that differ between the runs."""
    flat = [_texts(run.config) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [[key, *(config.get(key, "not set") for config in flat)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return Table("Differing settings", ["setting", *(run.name for run in runs)], rows, None, is_code=True)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as dotted keys and printable values."""
    return {key: text_of(value) for key, value in flatten(values).items()}


def expected_section(found: Sequence[Expectation]) -> Markup:
    """The section that compares measured gaps with their forecasts; empty for nothing."""
    rows = []
    for one in found:
        interval, shown = one.forecast.gap_percent, ["-"] * 3
        if interval is not None and one.probability is not None:
            ends = f"{interval.low:+.2f} to {interval.high:+.2f}"
            shown = [f"{interval.mean:+.2f} %", ends, f"{one.probability:.0%}"]
        rows.append([one.name, f"{one.gap:+.2f} %", *shown, one.word])
    head = ("run", "gap", "forecast", "90 %", "probability", "verdict")
    sentences = [one.text for one in found if one.word != "inside"]
    return part("expected", Table("Expected", head, rows, ("verdict",)), sentences) if found else Markup()
