"""The sections of the page that need no script: result, table, configuration, samples,
forecasts.

They are plain HTML, so the page can be read, searched and printed without JavaScript. Every text that comes
from a run passes through `html.escape`.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from narrowgauge.report.page.plain_page import html_table
from narrowgauge.report.read.records import flatten
from narrowgauge.report.read.run import Run
from narrowgauge.report.table.notes import table_notes
from narrowgauge.report.table.sentence import MOST, summary
from narrowgauge.report.table.table import TEXT_COLUMNS, table_rows
from narrowgauge.report.verdict.expected import Expectation
from narrowgauge.report.verdict.groups import groups

FEW_ROWS = 16  # up to this many, the rows of single seeds are shown initially


def title(runs: Sequence[Run]) -> str:
    """The heading, as text."""
    if len(runs) == 1:
        return runs[0].name
    count = len(groups(runs))
    if count == len(runs):
        return f"{count} runs compared"
    return (
        f"{len(runs)} runs of one variant" if count == 1 else f"{count} variants compared, {len(runs)} runs"
    )


def lead(runs: Sequence[Run]) -> str:
    """The result in sentences, with failures highlighted."""
    failed = min(MOST, sum(run.status == "failed" for run in runs))
    sentences = [escape(sentence).replace(" %", "&#160;%") for sentence in summary(runs)]
    marks = [' class="failed"' if number < failed else "" for number in range(len(sentences))]
    return "".join(f"<p{mark}>{sentence}</p>" for mark, sentence in zip(marks, sentences, strict=True))


def table(runs: Sequence[Run]) -> str:
    """The table of all runs and its notes, with a switch for the rows of single seeds if there are any."""
    rows = table_rows(runs)
    columns = list(rows[0].cells)
    align = {column: "" if column in TEXT_COLUMNS else ' class="number"' for column in columns}
    head = "".join(f'<th scope="col"{align[column]}>{escape(column)}</th>' for column in columns)
    body = ""
    for row in rows:
        name, *cells = row.cells.values()
        key = "" if row.is_seed else f'<span class="key" data-look="{row.variant}"></span>'
        tds = "".join(
            f"<td{align[column]}>{escape(cell)}</td>" for column, cell in zip(columns[1:], cells, strict=True)
        )
        kind = ' class="seed"' if row.is_seed else ""
        body += f'<tr{kind}><th scope="row">{key}{escape(name)}</th>{tds}</tr>'
    switch = ""
    if any(row.is_seed for row in rows):
        on = " checked" if len(rows) <= FEW_ROWS else ""
        switch = f'<label class="switch"><input type="checkbox" id="seeds"{on}><span>each seed</span></label>'
    items = "".join(f"<li>{escape(note)}</li>" for note in table_notes(runs))
    return (
        f'{switch}<div class="scroll" tabindex="0" role="region" aria-label="All runs"><table class="runs">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<ul class="notes">{items}</ul>'
    )


def configuration(runs: Sequence[Run]) -> str:
    """The configuration of one run; for several runs the differences, then each in full."""
    if len(runs) == 1:
        return _settings(runs[0])
    full = "".join(
        f"<details><summary>{escape(run.name)}</summary>{_settings(run)}</details>" for run in runs
    )
    return f"{_differences(runs)}<h3>Each in full</h3>{full}"


def samples(runs: Sequence[Run]) -> str:
    """The samples that the trained models wrote; empty without any."""
    figures = [
        f"<figure><figcaption>{escape(run.name)}{_prompt(prompt)}</figcaption><pre>\n{escape(text)}</pre></figure>"
        for run in runs
        for prompt, text in run.samples[-1:]
    ]
    return f"<section><h2>What the models write</h2>{''.join(figures)}</section>" if figures else ""


def _settings(run: Run) -> str:
    """The configuration and the recorded facts, one small table per section."""
    loose = {key: value for key, value in run.config.items() if not isinstance(value, Mapping)}
    sections = {key: value for key, value in run.config.items() if isinstance(value, Mapping)}
    named = [("", loose), *sections.items(), ("as it ran", _facts(run))]
    cards = [_card(name, values) for name, values in named if values]
    missing = "" if run.config else "<p>This run left no config.toml.</p>"
    return f'{missing}<div class="cards">{"".join(cards)}</div>{_recipe(run)}'


def _recipe(run: Run) -> str:
    """The text of the recipe, and the keys that the configuration sets over it; empty if there is none."""
    if not run.recipe_text:
        return ""
    section = run.config.get("recipe")
    texts = _setting_texts(section) if isinstance(section, Mapping) else {}
    places = [f"{key} = {text}" for key, text in texts.items() if key not in ("name", "backend")]
    over = f' <span class="muted">set over it: {escape(", ".join(places))}</span>' if places else ""
    caption = f"<figcaption>The recipe, as recipe.toml has it{over}</figcaption>"
    return f"<figure>{caption}<pre>\n{escape(run.recipe_text)}</pre></figure>"


def _facts(run: Run) -> dict[str, Any]:
    """The facts that the run recorded about itself and its machine."""
    counts = {"saves": run.count("save"), "resumes": run.count("resume"), "skipped steps": run.count("skip")}
    recorded = {key.replace("_", " "): value for key, value in run.facts.items()}
    facts = {**recorded, **counts, "status": run.status, "reason": run.reason}
    return {key: value for key, value in facts.items() if value not in (None, "")}


def _card(name: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
        for key, value in _setting_texts(values).items()
    )
    heading = f"<h4>{escape(name)}</h4>" if name else ""
    return f'<div class="card">{heading}<dl>{rows}</dl></div>'


def _differences(runs: Sequence[Run]) -> str:
    """A table of the settings that differ between the runs."""
    flat = [_setting_texts(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    differing = [key for key in keys if len({config.get(key) for config in flat}) > 1]
    if not differing:
        return "<p>The configurations are identical.</p>"
    head = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)
    body = "".join(
        f'<tr><th scope="row"><code>{escape(key)}</code></th>'
        + "".join(f"<td>{escape(config.get(key, 'not set'))}</td>" for config in flat)
        + "</tr>"
        for key in differing
    )
    return (
        "<h3>Where they differ</h3>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Differing settings"><table>'
        f'<thead><tr><th scope="col">setting</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _setting_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as dotted keys and printable values."""
    return {key: _setting_text(value) for key, value in flatten(values).items()}


def _setting_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_setting_text, value))
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _prompt(prompt: str) -> str:
    return f' <span class="muted">after the prompt</span> <q>{escape(prompt)}</q>' if prompt else ""


def expected_section(found: Sequence[Expectation]) -> str:
    """The section that compares measured gaps with their forecasts; "" for nothing."""
    if not found:
        return ""
    head = ("run", "gap", "forecast", "90 %", "probability", "verdict")
    lines = []
    for one in found:
        interval = one.forecast.gap_percent
        shown = ("-", "-", "-")
        if interval is not None and one.probability is not None:
            ends = f"{interval.low:+.2f} to {interval.high:+.2f}"
            shown = (f"{interval.mean:+.2f} %", ends, f"{one.probability:.0%}")
        lines.append([one.name, f"{one.gap:+.2f} %", *shown, one.word])
    notes = "".join(f"<p>{escape(one.text)}</p>" for one in found if one.word != "inside")
    table = html_table(head, lines, ("run", "verdict"))
    return f'<section id="expected"><h2>Expected</h2>{table}{notes}</section>'
