"""`narrowgauge bench`: the machine's ceilings, the time of a step by class against its floor, and peers.

The data are random tokens and the weights are the initial ones, because speed depends on neither. Nothing is
written to a run directory.

On a machine shared with other programs, a comparison is a ratio of two workers that take turns, so that a
disturbance affects both. It is reported as the median of the ratios with their quartiles.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.bench.ceilings import Ceilings, measure_apart
from narrowgauge.trainer.bench.peers import check_peers, default_peers
from narrowgauge.trainer.bench.work import Work
from narrowgauge.trainer.bench.worker import OURS, start_workers
from narrowgauge.trainer.runs import choose_device
from narrowgauge.trainer.runs.monitor.machine import device_name
from narrowgauge.trainer.runs.monitor.profiler import StepTime
from narrowgauge.trainer.training import Config


@dataclass(frozen=True)
class Spread:
    """The median and quartiles of some values."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """The spread of one or more values."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def speed_in_words(ratios: Sequence[float]) -> str:
    """A speed ratio in words, no stronger than its spread allows.

    A ratio is "faster" or "slower" only if both quartiles are on the same side of 1.

    >>> speed_in_words([1.9, 1.86, 1.8, 1.84, 1.92]), speed_in_words([0.57, 0.55, 0.6, 0.56, 0.58])
    ('faster, 1.86x [1.84, 1.90]', 'slower, 0.57x [0.56, 0.58]')
    >>> speed_in_words([0.9, 1.1, 1.0, 1.05, 0.95]), speed_in_words([1.4, 1.3])
    ('as fast within the spread, 1.00x [0.95, 1.05]', 'open, 1.35x in 2 rounds')
    """
    spread = Spread.of(ratios)
    if len(ratios) < 5:  # too few for meaningful quartiles
        return f"open, {spread.median:.2f}x in {len(ratios)} round{'s' * (len(ratios) != 1)}"
    low, high = round(spread.low, 2), round(spread.high, 2)  # as they are printed
    word = "faster" if low > 1 else "slower" if high < 1 else "as fast within the spread"
    return f"{word}, {spread.median:.2f}x [{spread.low:.2f}, {spread.high:.2f}]"


def take_turns(steps: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each step `rounds` times, taking turns; every other round runs in reverse order.

    Returns:
        name -> the values that its step returned (seconds), round by round.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        names = list(steps)
        for name in names if turn % 2 == 0 else reversed(names):
            times[name].append(steps[name]())
    return times


@dataclass(frozen=True)
class BenchResult:
    """All figures of a benchmark."""

    config: Config
    device: str
    backend: str
    work: Work
    ceilings: Ceilings
    profiled: StepTime
    seconds: dict[str, list[float]]  # worker -> times of a step, round by round
    failed: dict[str, str]  # peers that could not take a step -> reason
    memory: dict[str, int]  # peak bytes of our process: allocated, reserved

    def ratios(self, peer: str) -> list[float]:
        """Our speed as a multiple of the peer's: its time divided by ours, round by round."""
        return [peer / own for peer, own in zip(self.seconds[peer], self.seconds[OURS], strict=True)]

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.training.batch_size * self.config.data.sequence_length

    @property
    def busy(self) -> float:
        """The share of our step in which the device computes; in the rest it waits for the host."""
        busy_ms = self.profiled.step_ms - self.profiled.classes["idle"]
        return min(1.0, busy_ms / (1e3 * Spread.of(self.seconds[OURS]).median))

    def as_json(self) -> dict[str, Any]:
        """All figures as JSON values."""
        names = [name for name in self.seconds if name != OURS]
        return {
            "torch": torch.__version__,
            "device": self.device,
            "model": self.config.model.name,
            "recipe": self.config.recipe.name,
            "backend": self.backend,
            "tokens_per_step": self.tokens,
            "ceilings": self.ceilings.as_json(),
            "step_ms_profiled": self.profiled.step_ms,
            "classes_ms": self.profiled.classes,
            "floor_ms": self.ceilings.floor_ms(self.work),
            "seconds": self.seconds,
            "failed": self.failed,
            "memory": self.memory,
            "device_is_busy": self.busy,
            "faster_than": {name: vars(Spread.of(self.ratios(name))) for name in names},
            "in_words": {name: speed_in_words(self.ratios(name)) for name in names},
        }


def bench(config: Config, peers: Sequence[str] | None, rounds: int, console: Console) -> BenchResult:
    """Measure and print the result.

    Args:
        config: the model, recipe and batch; one process.
        peers: names of the peers to time (`bench.peers`); None: all that fit this machine.
        rounds: number of timed rounds; each worker takes one step a round.
        console: where tables are printed.

    Returns:
        All figures, which are also printed.

    Raises:
        UserError: a peer is unknown, or not installed.
    """
    device = choose_device(config.training.device)
    names = default_peers(device) if peers is None else peers
    check_peers(names, device)
    with console.status("") as status:
        status.update("the machine's ceilings")
        backend, work, ceilings = measure_apart(config, device)
        # A GPU has memory for one large model, and its timings are steady enough for each contestant to run
        # alone. Other programs disturb a CPU, so there all are in memory together and take turns.
        contestants = [OURS, *names]
        groups = [[name] for name in contestants] if device.type == "cuda" else [contestants]
        seconds, profiled, failed, memory = timed(groups, config, rounds, status.update)
    name = device_name(device)
    result = BenchResult(config, name, backend.name, work, ceilings, profiled, seconds, failed, memory)
    _print(result, console)
    return result


def timed(
    groups: Sequence[Sequence[str]], config: Config, rounds: int, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], StepTime, dict[str, str], dict[str, int]]:
    """Time the contestants; those of a group are in memory together, and end before the next group starts.

    `say` is called with the name of each stage that begins. A peer that fails, for lack of memory or of a
    compiler, is left out; our own failure is a UserError.

    Returns:
        The seconds of each contestant, round by round; the time of our step by class; the peers that failed,
        with the reason; and the memory of our step.
    """
    seconds: dict[str, list[float]] = {}
    profiled: StepTime | None = None
    failed: dict[str, str] = {}
    memory: dict[str, int] = {}
    for names in groups:
        say("warm-up")
        with start_workers(names, config) as workers:
            for name in names:
                say(f"warm-up of {name}")
                try:
                    workers[name]("ready")
                except UserError as error:
                    if name == OURS:
                        raise
                    failed[name] = str(error)
                    del workers[name]
            say(f"{rounds} rounds of {', '.join(names)}")
            seconds |= take_turns({name: partial(ask, "step") for name, ask in workers.items()}, rounds)
            if OURS in workers:
                memory = workers[OURS]("memory")
                say("profile")
                profiled = workers[OURS]("profile")
    assert profiled is not None
    return seconds, profiled, failed, memory


def _print(result: BenchResult, console: Console) -> None:
    t, c, say = result.config.training, result.ceilings, partial(console.print, highlight=False)
    say(
        f"{result.config.model.name}, recipe {result.config.recipe.name} ({result.backend}), "
        f"{t.batch_size} x {result.config.data.sequence_length} tokens, {result.device}"
    )
    say(_ceilings_table(result))
    say(
        f"attention {1e3 * c.attention_forward_s:.2f} ms forward, {1e3 * c.attention_backward_s:.2f} ms "
        f"backward per layer; a copy moves {c.copy_bytes_per_s / 1e9:.1f} GB/s\n"
    )
    say(_classes_table(result))
    say(
        "floor: the work of each class, counted from shapes, at the machine's ceilings. Classes are measured "
        "in a profiled step, which is slower.\n",
        style="dim",
    )
    say(_peers_table(result))


def _table(first: str, *figures: str) -> Table:
    table = Table(first, box=None, header_style="bold")
    for column in figures:
        table.add_column(column, justify="right")
    return table


def _ceilings_table(result: BenchResult) -> Table:
    table = _table("matmul (m, n, k)", "format", "times", "TFLOP/s")
    for gemm, seconds in result.ceilings.gemm_s.items():
        shape = f"{gemm.m} x {gemm.n} x {gemm.k}"
        table.add_row(shape, gemm.kind, str(result.work.gemms[gemm]), f"{gemm.flops / seconds / 1e12:.3f}")
    return table


def _classes_table(result: BenchResult) -> Table:
    floor = result.ceilings.floor_ms(result.work)
    table = _table("class", "ms per step", "floor", "floor / time")
    for name, ms in result.profiled.classes.items():
        least = floor.get(name, 0.0)
        if ms or least:
            share = f"{least / ms:.0%}" if ms and least else ""
            table.add_row(name, f"{ms:.1f}", f"{least:.1f}", share)
    own, least = 1e3 * Spread.of(result.seconds[OURS]).median, sum(floor.values())
    for name, ms in (("total", result.profiled.step_ms), ("not profiled", own)):
        table.add_row(name, f"{ms:.1f}", f"{least:.1f}", f"{least / ms:.0%}", style="bold")
    return table


def _peers_table(result: BenchResult) -> Table:
    table = _table("program", "tokens/s", "ms per step")
    table.add_column("narrowgauge is")
    for name, seconds in result.seconds.items():
        median = Spread.of(seconds).median
        ratio = "" if name == OURS else speed_in_words(result.ratios(name))
        table.add_row(name, f"{result.tokens / median:,.0f}", f"{1e3 * median:.1f}", ratio)
    for name, why in result.failed.items():
        table.add_row(name, "", "", why)
    return table
