"""The answer of `bench --verify`: all findings about a machine, as one JSON file and one page.

    machine     versions, driver, clocks, the command (`bench.machine`)
    measured    ceilings, a step's time by class, memory, peers: the figures of `bench`, if a step was timed
    counted     the same step, counted for this GPU (`simulate.count`); absent on a CPU
    verify      the checks (`bench.verify`)
    errors      parts that failed, each with its traceback

Both files are rewritten after each check. A run that is killed leaves everything it has found so far, with
`complete` false.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from traceback import format_exception

import torch
from rich.console import Console

from narrowgauge.bench.bench import BenchResult, bench
from narrowgauge.bench.machine import machine_facts
from narrowgauge.bench.timing import Spread
from narrowgauge.bench.verify import Verdict, verify
from narrowgauge.bench.verify.check import DIFFERS
from narrowgauge.bench.worker import OURS
from narrowgauge.files import write_whole
from narrowgauge.kernels import has_kernels
from narrowgauge.recipes import device_facts
from narrowgauge.report.page.plain_page import html_table, plain_page
from narrowgauge.simulate import H200, StepCount, count_step
from narrowgauge.training import Config


@dataclass(frozen=True)
class Answer:
    """The findings about a machine so far."""

    machine: dict[str, object]
    verdict: Verdict | None = None
    measured: BenchResult | None = None
    counted: StepCount | None = None
    errors: Sequence[dict[str, str]] = field(default_factory=list)
    complete: bool = False

    def as_json(self) -> dict[str, object]:
        """All findings as JSON values."""
        return {
            "complete": self.complete,
            "machine": self.machine,
            "measured": self.measured and self.measured.as_json(),
            "counted": self.counted and self.counted.as_json(),
            "verify": self.verdict and self.verdict.as_json(),
            "errors": list(self.errors),
        }

    def write(self, file: Path) -> Path:
        """Write the JSON to a file and the page next to it; returns the path of the page."""
        write_whole(file, json.dumps(self.as_json(), indent=2) + "\n")
        page = file.with_suffix(".html")
        write_whole(page, self.page())
        return page

    def page(self) -> str:
        """The page."""
        name, found = str(self.machine["device"]), self.verdict.findings if self.verdict else ()
        parts = [f"<h1>{escape(name)}</h1><p>{escape(self._lead())}</p>"]
        if wrong := [f for f in found if f.outcome == DIFFERS]:
            rows = [[f"{f.group}: {f.name}", f.found, f.do] for f in wrong]
            parts.append("<h2>What differs</h2>" + html_table(("check", "found", "what to do"), rows))
        for error in self.errors:
            parts.append(f"<h2>{escape(error['part'])} failed</h2><pre>{escape(error['traceback'])}</pre>")
        if self.measured is not None:
            parts += _measured(self.measured, self.counted)
        rows = [[f"{f.group}: {f.name}", f.outcome, f"{f.seconds:.1f}", f.found] for f in found]
        parts.append("<h2>All checks</h2>" + html_table(("check", "outcome", "seconds", "found"), rows))
        about = [[key, str(value)] for key, value in self.machine.items()]
        parts.append("<h2>The machine</h2>" + html_table(("what", "found"), about))
        return plain_page(f"{name} - narrowgauge", parts)

    def _lead(self) -> str:
        words = f"{self.verdict.sentence()}. {self.verdict.facts}." if self.verdict else "No check has ended."
        return words if self.complete else f"{words} The run is incomplete: still going, or stopped early."


def find(config: Config, peers: Sequence[str] | None, rounds: int, file: Path, console: Console) -> Answer:
    """Measure and verify, and write the findings after each part and each check.

    Our own step comes first: most users want its speed and memory, and it takes two minutes. Peers, which
    need a compiler, come last.

    Args:
        config: The step that is timed.
        peers: Names of peers; None for all that fit the machine, empty for none.
        rounds: The number of timed rounds; 0 skips the timing.
        file: The JSON file; the page is written next to it.
        console: Where tables and findings are printed.
    """
    device = torch.device(config.training.device)
    answer = Answer(machine_facts(device))
    answer.write(file)

    def note(**found: object) -> None:
        nonlocal answer
        answer = replace(answer, **found)  # type: ignore[arg-type]
        answer.write(file)

    def attempt(part: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # torch and drivers raise anything; the other parts can still run
            text = "".join(format_exception(error))
            console.print(f"{part} failed: {error}", highlight=False, markup=False, soft_wrap=True)
            note(errors=[*answer.errors, {"part": part, "error": str(error), "traceback": text}])

    if rounds:
        attempt("the step", lambda: note(measured=bench(config, [], rounds, console)))
        if device.type == "cuda" and has_kernels(device) and not config.training.compile:
            attempt("the count", lambda: note(counted=count_step(config, device_facts(device), H200)))
    note(verdict=verify(device, console, lambda verdict: note(verdict=verdict)))
    if rounds and peers != [] and not answer.errors:
        attempt("peers", lambda: note(measured=bench(config, peers, rounds, console)))
    note(complete=True)
    return answer


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
    config, gib = result.config, 2.0**30
    memory = f"A step held {result.memory.get('allocated', 0) / gib:.1f} GiB"
    memory += f" of tensors, {result.memory.get('reserved', 0) / gib:.1f} GiB reserved"
    if counted is not None:
        memory += f"; {counted.peak_bytes / gib:.1f} GiB are counted"
    memory += f". The device computes in {result.busy:.0%} of a step."
    title = (
        f"{config.model.name}, recipe {config.recipe.name} ({result.backend}), "
        f"{config.training.batch_size} x {config.data.sequence_length} tokens"
    )
    return [
        f"<h2>{escape(title)}</h2>" + html_table(("program", "tokens/s", "narrowgauge is"), speeds),
        f"<p>{escape(memory)}</p>",
        "<h2>A step's time by class</h2>" + html_table(("class", "ms", "floor"), classes),
        f"<h2>Ceilings</h2><p>A copy moves {result.ceilings.copy_bytes_per_s / 1e9:.0f} GB/s.</p>"
        + html_table(("matmul (m, n, k)", "format", "times", "TFLOP/s"), gemms),
    ]
