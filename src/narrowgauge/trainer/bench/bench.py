"""`narrowgauge bench`: the machine's ceilings, the time of a step by class against its floor, and peers.

The data are random tokens and the weights are the initial ones, because speed depends on neither. Nothing is
written to a run directory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.bench.ceilings import Ceilings, measure_apart
from narrowgauge.trainer.bench.peers import check_peers, default_peers
from narrowgauge.trainer.bench.timing import Spread, speed_in_words, take_turns
from narrowgauge.trainer.bench.work import Work
from narrowgauge.trainer.bench.worker import OURS, start_workers
from narrowgauge.trainer.runs import choose_device
from narrowgauge.trainer.runs.monitor.hardware import device_name
from narrowgauge.trainer.runs.monitor.profiler import StepTime
from narrowgauge.trainer.training import Config


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
        pairs = zip(self.seconds[peer], self.seconds[OURS], strict=True)
        return [peer_s / our_s for peer_s, our_s in pairs]

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
        groups = alive_at_once([OURS, *names], device)
        seconds, profiled, failed, memory = timed(groups, config, rounds, status.update)
    name = device_name(device)
    result = BenchResult(config, name, backend.name, work, ceilings, profiled, seconds, failed, memory)
    _print(result, console)
    return result


def alive_at_once(names: Sequence[str], device: torch.device) -> list[list[str]]:
    """Groups of contestants that are in memory together and take turns.

    A GPU has memory for one large model, so each contestant runs alone; GPU timings are steady enough for
    that. Other programs disturb a CPU, so there all contestants take turns.
    """
    return [[name] for name in names] if device.type == "cuda" else [list(names)]


def timed(
    groups: Sequence[Sequence[str]], config: Config, rounds: int, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], StepTime, dict[str, str], dict[str, int]]:
    """Time the contestants.

    Args:
        groups: contestants that are in memory together; the processes of a group end before the next starts.
        config: the model, recipe and batch.
        rounds: steps that each takes.
        say: called with the name of each stage that begins.

    Returns:
        The seconds of each contestant, round by round; the time of our step by class; the peers that failed,
        with the reason; and the memory of our step.

    Raises:
        UserError: our own step fails. A peer that fails, for lack of memory or of a compiler, is left out.
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
    t, c = result.config.training, result.ceilings
    console.print(
        f"{result.config.model.name}, recipe {result.config.recipe.name} ({result.backend}), "
        f"{t.batch_size} x {result.config.data.sequence_length} tokens, {result.device}",
        highlight=False,
    )
    console.print(_ceilings_table(result))
    console.print(
        f"attention {1e3 * c.attention_forward_s:.2f} ms forward, {1e3 * c.attention_backward_s:.2f} ms "
        f"backward per layer; a copy moves {c.copy_bytes_per_s / 1e9:.1f} GB/s\n",
        highlight=False,
    )
    console.print(_classes_table(result))
    console.print(
        "floor: the work of each class, counted from shapes, at the machine's ceilings. Classes are measured "
        "in a profiled step, which is slower.\n",
        style="dim",
        highlight=False,
    )
    console.print(_peers_table(result))


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
    total, least = result.profiled.step_ms, sum(floor.values())
    table.add_row("total", f"{total:.1f}", f"{least:.1f}", f"{least / total:.0%}", style="bold")
    ours = 1e3 * Spread.of(result.seconds[OURS]).median
    table.add_row("not profiled", f"{ours:.1f}", f"{least:.1f}", f"{least / ours:.0%}", style="bold")
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
