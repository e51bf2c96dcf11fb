"""What the page shows of runs in words: title, result, origin, configuration, layers, samples, forecasts."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from narrowgauge.system.units import human_duration
from narrowgauge.trainer.report.page.html import Table, part
from narrowgauge.trainer.report.read.records import flatten
from narrowgauge.trainer.report.read.run import Run
from narrowgauge.trainer.report.table.sentence import MOST, summary
from narrowgauge.trainer.report.table.table import SEED, TEXT_COLUMNS, kind_of, table_rows
from narrowgauge.trainer.report.verdict.expected import Expectation
from narrowgauge.trainer.report.verdict.verdict import Verdict

_LISTED = 3  # hosts, devices or versions


def title(runs: Sequence[Run], found: Sequence[Verdict]) -> str:
    """The heading."""
    if len(runs) == 1:
        return runs[0].name
    count = sum(bool(one.runs) for one in found)
    if count == len(runs):
        return f"{count} runs compared"
    return (
        f"{len(runs)} runs of one variant" if count == 1 else f"{count} variants compared, {len(runs)} runs"
    )


def lead(runs: Sequence[Run], found: Sequence[Verdict]) -> list[tuple[str, bool]]:
    """The result in sentences, each with whether it is a failure."""
    failed = min(MOST, sum(run.has_failed for run in runs))
    return [
        (text.replace(" %", "\u00a0%"), number < failed) for number, text in enumerate(summary(runs, found))
    ]


def origin(runs: Sequence[Run], command: str = "") -> dict[str, str]:
    """When, how long, where, with which version and command line the runs were trained, by name.

    Start and resume events record these. What an older run did not record is left out. `command` is the
    command line of a comparison that made the page.
    """
    seconds = sum(run.seconds for run in runs)
    facts = {
        "date": _dates(runs),
        "duration": f"{human_duration(seconds)} in training steps" if seconds else "",
        "host": _listed(runs, ("host", "device")),
        "recipe": _placements(runs),
        "version": _listed(runs, ("version", "torch"), ("narrowgauge ", "torch ")),
        "command": command or (str(runs[0].facts.get("command") or "") if len(runs) == 1 else ""),
    }
    return {name: text for name, text in facts.items() if text}


def _dates(runs: Sequence[Run]) -> str:
    """When the first run began and the last one ended."""
    begun = [time for run in runs if (time := _time_of(run, "start", first=True))]
    ended = [time for run in runs if (time := _time_of(run, "done", "stop"))]
    if not begun:
        return ""
    until = f" to {max(ended):%Y-%m-%d %H:%M}" if len(ended) == len(runs) else ""
    return f"{min(begun):%Y-%m-%d %H:%M}{until} UTC"


def _placements(runs: Sequence[Run]) -> str:
    """The layers that each recipe keeps wide, and the blocks that do not fit the model."""
    found = {run.recipe: run.facts.get("placement") for run in runs}
    texts = [f"{name}: {'; '.join(map(str, lines))}" for name, lines in found.items() if lines]
    return ". ".join(texts)


def _time_of(run: Run, *names: str, first: bool = False) -> datetime | None:
    """The time of the first or last event with one of these names."""
    times = [event.get("time") for event in run.events if event["event"] in names]
    for text in times if first else reversed(times):
        try:
            return datetime.fromisoformat(str(text)).astimezone(UTC)
        except ValueError:
            continue
    return None


def _listed(runs: Sequence[Run], keys: Sequence[str], before: Sequence[str] = ("", "")) -> str:
    """The values of some facts over all runs, each once; `before` is a prefix for each value."""
    found = {
        ", ".join(
            f"{word}{run.facts[key]}" for key, word in zip(keys, before, strict=True) if run.facts.get(key)
        ): 0
        for run in runs
    }
    texts = [text for text in found if text]
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return "; ".join(texts[:_LISTED]) + more


def all_runs(runs: Sequence[Run], found: Sequence[Verdict]) -> Table:
    """The table of all runs; each variant has its line of the charts before its name."""
    shown = table_rows(runs, found)
    key = Markup('<span class="key" data-look="{}"></span>{}')
    rows = [
        [name if kind_of(row) == SEED else key.format(kind_of(row), name), *cells]
        for row in shown
        for name, *cells in [row.values()]
    ]
    return Table("All runs", list(shown[0]), rows, TEXT_COLUMNS)


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
