"""The answer of `bench --verify`: everything that was found about a machine, as one JSON file and one page.

    verify      the checks (`bench.verify`)
    measured    ceilings, a step's time by class, peers: the figures of `bench`, if a step was timed
    counted     the same step as it is counted for this GPU (`simulate.count`), if it is one

The files are written anew after each part, so that a later part that fails takes nothing away.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from narrowgauge.bench.bench import BenchResult
from narrowgauge.bench.timing import Spread
from narrowgauge.bench.verify import Verdict
from narrowgauge.bench.verify.check import DIFFERS
from narrowgauge.bench.worker import OURS
from narrowgauge.files import write_whole
from narrowgauge.report.page.plain_page import html_table, plain_page
from narrowgauge.simulate import StepCount


@dataclass(frozen=True)
class Answer:
    """What was found about a machine."""

    verdict: Verdict
    measured: BenchResult | None = None
    counted: StepCount | None = None

    def as_json(self) -> dict[str, object]:
        """All of it as JSON values."""
        return {
            "verify": self.verdict.as_json(),
            "measured": self.measured and self.measured.as_json(),
            "counted": self.counted and self.counted.as_json(),
        }

    def write(self, file: Path) -> Path:
        """Write the JSON to a file, and the page beside it, whose path is returned."""
        write_whole(file, json.dumps(self.as_json(), indent=2) + "\n")
        page = file.with_suffix(".html")
        write_whole(page, self.page())
        return page

    def page(self) -> str:
        """The page."""
        parts = [f"<h1>{escape(self.verdict.device)}</h1><p>{escape(self._lead())}</p>"]
        if wrong := [f for f in self.verdict.findings if f.outcome == DIFFERS]:
            rows = [[f"{f.group}: {f.name}", f.found, f.do] for f in wrong]
            parts.append("<h2>What differs</h2>" + html_table(("check", "found", "what to do"), rows))
        if self.measured is not None:
            parts += _measured(self.measured, self.counted)
        rows = [
            [f"{f.group}: {f.name}", f.outcome, f"{f.seconds:.1f}", f.found] for f in self.verdict.findings
        ]
        parts.append("<h2>All checks</h2>" + html_table(("check", "outcome", "seconds", "found"), rows))
        return plain_page(f"{self.verdict.device} - narrowgauge", parts)

    def _lead(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.verdict.versions.items())
        return f"{self.verdict.sentence()}. {self.verdict.facts}; {versions}."


def _measured(result: BenchResult, counted: StepCount | None) -> list[str]:
    floor = result.ceilings.floor_ms(result.work)
    classes: list[Sequence[str]] = [
        [name, f"{ms:.1f}", f"{floor.get(name, 0.0):.1f}"] for name, ms in result.profiled.classes.items()
    ]
    gemms = [
        [f"{g.m} x {g.n} x {g.k}", g.kind, str(result.work.gemms[g]), f"{g.flops / s / 1e12:.1f}"]
        for g, s in result.ceilings.gemm_s.items()
    ]
    words = result.as_json()["in_words"]
    speeds = [
        [name, f"{result.tokens / Spread.of(taken).median:,.0f}", words.get(name, "")]
        for name, taken in result.seconds.items()
    ]
    speeds += [[name, "", why] for name, why in result.failed.items()]
    if counted is not None:
        own = Spread.of(result.seconds[OURS]).median
        share = counted.step_seconds(calibrated=True) / own
        why = f"counted, calibrated; the measured step takes {1 / share:.2f} times that"
        speeds.append(["counted for this GPU", f"{counted.tokens_per_s(calibrated=True):,.0f}", why])
    config = result.config
    title = (
        f"{config.model.name}, recipe {config.recipe.name} ({result.backend}), "
        f"{config.training.batch_size} x {config.data.sequence_length} tokens"
    )
    return [
        f"<h2>{escape(title)}</h2>" + html_table(("who", "tokens/s", "narrowgauge is"), speeds),
        "<h2>A step's time by class</h2>" + html_table(("class", "ms", "floor"), classes),
        f"<h2>Ceilings</h2><p>A copy moves {result.ceilings.copy_bytes_per_s / 1e9:.0f} GB/s.</p>"
        + html_table(("product (m, n, k)", "in", "times", "TFLOP/s"), gemms),
    ]
