"""The sections of the page that need no script: summary, tables, configuration, samples.

They are plain HTML, so that the page can be read, searched and printed without JavaScript. Every text that
comes from a run passes through `html.escape`.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from narrowgauge.report.compare.table import (
    TEXT_COLUMNS,
    comparison_notes,
    comparison_rows,
    format_gap,
    format_loss,
    gap_to,
)
from narrowgauge.report.compare.verdict import verdict_notes, verdict_rows, verdicts
from narrowgauge.report.read.records import flatten
from narrowgauge.report.read.run import Run
from narrowgauge.units import human_count

VERDICT_TEXT_COLUMNS = ("variant", "verdict", "arithmetic")


def title(runs: Sequence[Run]) -> str:
    """The heading, as text."""
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"


def summary(runs: Sequence[Run]) -> str:
    """The result of the runs in one sentence, as text."""
    return _summary_of_one(runs[0]) if len(runs) == 1 else _summary_of_many(runs)


def table(runs: Sequence[Run]) -> str:
    """The comparison table and its notes."""
    rows = comparison_rows(runs)
    keys = [f'<span class="key" data-run="{number}"></span>' for number in range(len(rows))]
    return _table(rows, keys, TEXT_COLUMNS, "Comparison of the runs", comparison_notes(runs))


def verdict_section(runs: Sequence[Run]) -> str:
    """The verdict on each variant and the notes, as a section; empty for a single run."""
    if len(runs) < 2:
        return ""
    all_verdicts = verdicts(runs)
    rows, notes = verdict_rows(all_verdicts), verdict_notes(all_verdicts)
    html = _table(rows, [""] * len(rows), VERDICT_TEXT_COLUMNS, "Verdict on each variant", notes)
    return f'<section class="verdicts"><h2>Verdicts</h2>{html}</section>'


def configuration(runs: Sequence[Run]) -> str:
    """The configuration of one run; for several runs the differences, then each in full."""
    if len(runs) == 1:
        return _settings(runs[0])
    full = "".join(
        f"<details><summary>{escape(run.name)}</summary>{_settings(run)}</details>" for run in runs
    )
    return f"{_differences(runs)}<h3>Each in full</h3>{full}"


def samples(runs: Sequence[Run]) -> str:
    """The samples that the trained models wrote; empty if no run has one."""
    figures = [
        f"<figure><figcaption>{escape(run.name)}{_prompt(prompt)}</figcaption><pre>\n{escape(text)}</pre></figure>"
        for run in runs
        for prompt, text in run.samples[-1:]
    ]
    return f"<section><h2>What the models write</h2>{''.join(figures)}</section>" if figures else ""


def _summary_of_one(run: Run) -> str:
    arithmetic = f" in {run.backend} arithmetic" if run.backend else ""
    recipe = f"Recipe {run.recipe}{arithmetic}" if run.recipe else "This run"
    if not run.steps:
        return f"{recipe}: no step has been recorded yet (status: {run.status})."
    loss_name = "train" if run.final_val_loss is None else "validation"
    loss = run.final_train_loss if run.final_val_loss is None else run.final_val_loss
    state = "" if run.status == "done" else f" (status: {run.status})"
    steps = run.steps[-1].step
    reached = f"{steps:,} step{'s' * (steps != 1)} and {human_count(run.tokens)} tokens"
    return f"{recipe}: {loss_name} loss {format_loss(loss)} after {reached}{state}."


def _summary_of_many(runs: Sequence[Run]) -> str:
    by_validation = runs[0].final_val_loss is not None
    loss_name = "validation" if by_validation else "train"
    losses = {run.name: run.final_val_loss if by_validation else run.final_train_loss for run in runs}
    finite = {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}
    if not finite:
        return "No run has a finite loss yet."
    best = min(finite, key=lambda name: finite[name])
    sentence = f"The lowest {loss_name} loss is {best}'s, {format_loss(finite[best])}"
    gaps = {run.name: gap for run in runs[1:] if (gap := gap_to(run, runs[0])) and math.isfinite(gap.percent)}
    if gaps:
        widest = max(gaps, key=lambda name: abs(gaps[name].percent))
        sentence += f"; the widest gap to {runs[0].name} is {widest}'s, {format_gap(gaps[widest])}"
    lost = [run.name for run in runs if not math.isfinite(run.final_train_loss or 0.0)]
    if lost:
        sentence += f"; no longer finite: {', '.join(lost)}"
    unfinished = sum(run.status != "done" for run in runs)
    return sentence + (f"; not finished: {unfinished} of {len(runs)} runs." if unfinished else ".")


def _table(
    rows: Sequence[Mapping[str, str]],
    keys: Sequence[str],
    text_columns: Sequence[str],
    label: str,
    notes: Sequence[str],
) -> str:
    """A table with notes; `keys` is HTML before the name of each row, which is its first column."""
    align = {column: "" if column in text_columns else ' class="number"' for column in rows[0]}
    head = "".join(f'<th scope="col"{align[column]}>{escape(column)}</th>' for column in rows[0])
    body = ""
    for row, key in zip(rows, keys, strict=True):
        (_, name), *cells = row.items()
        tds = "".join(f"<td{align[column]}>{escape(value)}</td>" for column, value in cells)
        body += f'<tr><th scope="row">{key}{escape(name)}</th>{tds}</tr>'
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<ul class="notes">{items}</ul>'
    )


def _settings(run: Run) -> str:
    """The configuration and the recorded facts, one small table for each section."""
    loose = {key: value for key, value in run.config.items() if not isinstance(value, Mapping)}
    sections = {key: value for key, value in run.config.items() if isinstance(value, Mapping)}
    named = [("", loose), *sections.items(), ("as it ran", _facts(run))]
    cards = [_card(name, values) for name, values in named if values]
    missing = "" if run.config else "<p>This run left no config.toml.</p>"
    return f'{missing}<div class="cards">{"".join(cards)}</div>'


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
