"""The origin of the runs of a page: when, how long, where, with which version and command line.

Start and resume events record these. Facts that an older run did not record are left out.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from narrowgauge.report.read.run import Run
from narrowgauge.units import human_duration

MOST = 3  # listed hosts, devices or versions


def origin(runs: Sequence[Run], command: str = "") -> dict[str, str]:
    """The facts by name; `command` is the command line of a comparison that made the page."""
    facts = {
        "date": _dates(runs),
        "duration": _duration(runs),
        "host": _listed(runs, ("host", "device")),
        "recipe": _placements(runs),
        "version": _listed(runs, ("version", "torch"), ("narrowgauge ", "torch ")),
        "command": command or (str(runs[0].facts.get("command") or "") if len(runs) == 1 else ""),
    }
    return {name: text for name, text in facts.items() if text}


def _dates(runs: Sequence[Run]) -> str:
    """When the first run began and the last one ended."""
    begun = [time for run in runs if (time := _time(run, "start", first=True))]
    ended = [time for run in runs if (time := _time(run, "done", "stop"))]
    if not begun:
        return ""
    text = f"{min(begun):%Y-%m-%d %H:%M}"
    until = f"{max(ended):%Y-%m-%d %H:%M}" if len(ended) == len(runs) else text
    if until != text:
        text += f" to {until.removeprefix(text[:11])}"
    return f"{text} UTC"


def _duration(runs: Sequence[Run]) -> str:
    """The time in steps, and from begin to end for a single uninterrupted run."""
    in_steps = sum(run.seconds for run in runs)
    if not in_steps:
        return ""
    text = f"{human_duration(in_steps)} in training steps"
    if len(runs) == 1 and not runs[0].count("resume"):
        begun, ended = _time(runs[0], "start", first=True), _time(runs[0], "done", "stop")
        if begun and ended and ended > begun:
            text = f"{human_duration((ended - begun).total_seconds())}, of which {text}"
    return text


def _placements(runs: Sequence[Run]) -> str:
    """The layers that each recipe keeps wide, and the blocks that do not fit the model."""
    found = {run.recipe: run.facts.get("placement") for run in runs}
    texts = [f"{name}: {'; '.join(map(str, lines))}" for name, lines in found.items() if lines]
    return ". ".join(texts)


def _time(run: Run, *names: str, first: bool = False) -> datetime | None:
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
    more = f" and {len(texts) - MOST} more" if len(texts) > MOST else ""
    return "; ".join(texts[:MOST]) + more
