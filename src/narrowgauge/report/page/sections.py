"""What the page shows of runs in words: title, result, configuration, samples, forecasts."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from narrowgauge.report.page.html import Cell, Table, part
from narrowgauge.report.read.records import flatten
from narrowgauge.report.read.run import Run
from narrowgauge.report.table.sentence import MOST, summary
from narrowgauge.report.table.table import TEXT_COLUMNS, table_rows
from narrowgauge.report.verdict.expected import Expectation
from narrowgauge.report.verdict.groups import groups


def title(runs: Sequence[Run]) -> str:
    """The heading."""
    if len(runs) == 1:
        return runs[0].name
    count = len(groups(runs))
    if count == len(runs):
        return f"{count} runs compared"
    return (
        f"{len(runs)} runs of one variant" if count == 1 else f"{count} variants compared, {len(runs)} runs"
    )


def lead(runs: Sequence[Run]) -> list[tuple[str, bool]]:
    """The result in sentences, each with whether it is a failure."""
    failed = min(MOST, sum(run.status == "failed" for run in runs))
    return [(text.replace(" %", "\u00a0%"), number < failed) for number, text in enumerate(summary(runs))]


def all_runs(runs: Sequence[Run]) -> Table:
    """The table of all runs; each variant has its line of the charts before its name."""
    found = table_rows(runs)
    key = Markup('<span class="key" data-look="{}"></span>{}')
    rows = [
        [Cell(name, "seed") if row.is_seed else key.format(row.variant, name), *cells]
        for row in found
        for name, *cells in [row.cells.values()]
    ]
    return Table("All runs", list(found[0].cells), rows, TEXT_COLUMNS)


def settings(run: Run) -> dict[str, Any]:
    """The configuration and the recorded facts in small tables, the recipe, and the keys set over it."""
    loose = {key: value for key, value in run.config.items() if not isinstance(value, Mapping)}
    sections = {key: value for key, value in run.config.items() if isinstance(value, Mapping)}
    named = [("", loose), *sections.items(), ("as it ran", _facts(run))]
    recipe = _setting_texts(sections.get("recipe", {}))
    return {
        "name": run.name,
        "has_config": bool(run.config),
        "cards": [(name, _setting_texts(values)) for name, values in named if values],
        "recipe": run.recipe_text,
        "over": ", ".join(f"{k} = {text}" for k, text in recipe.items() if k not in ("name", "backend")),
    }


def differences(runs: Sequence[Run]) -> Table:
    """The settings that differ between the runs."""
    flat = [_setting_texts(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    differing = [key for key in keys if len({config.get(key) for config in flat}) > 1]
    rows = [[key, *(config.get(key, "not set") for config in flat)] for key in differing]
    return Table("Differing settings", ["setting", *(run.name for run in runs)], rows, None, is_code=True)


def samples(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """(run, prompt, text) of the last sample that each trained model wrote."""
    return [(run.name, *sample) for run in runs for sample in run.samples[-1:]]


def _facts(run: Run) -> dict[str, Any]:
    """The facts that the run recorded about itself and its machine."""
    counts = {"saves": run.count("save"), "resumes": run.count("resume"), "skipped steps": run.count("skip")}
    recorded = {key.replace("_", " "): value for key, value in run.facts.items()}
    facts = {**recorded, **counts, "status": run.status, "reason": run.reason}
    return {key: value for key, value in facts.items() if value not in (None, "")}


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


def expected_section(found: Sequence[Expectation]) -> Markup:
    """The section that compares measured gaps with their forecasts; empty for nothing."""
    if not found:
        return Markup()
    rows = []
    for one in found:
        interval = one.forecast.gap_percent
        shown = ("-", "-", "-")
        if interval is not None and one.probability is not None:
            ends = f"{interval.low:+.2f} to {interval.high:+.2f}"
            shown = (f"{interval.mean:+.2f} %", ends, f"{one.probability:.0%}")
        rows.append([one.name, f"{one.gap:+.2f} %", *shown, one.word])
    head = ("run", "gap", "forecast", "90 %", "probability", "verdict")
    sentences = [one.text for one in found if one.word != "inside"]
    return part("expected", Table("Expected", head, rows, ("verdict",)), sentences)
