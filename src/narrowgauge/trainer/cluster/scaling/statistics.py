"""Computes the scaling figures from the measured steps of 1..N processes.

strong          the same total tokens a step: does the same work finish sooner?
weak            the same tokens a step for each process: does more work finish in the same time?
step            the geometric mean over the rounds of the median step of the slowest process
speed-up S      tokens/s, relative to the fewest processes measured; its interval is Student's, over the
                logarithms of the speed-ups of the rounds, so that drift of the machine counts
efficiency      S / (N / N of the fewest)
communication   the share of a step in which a process waits for others (`worker`), averaged over processes
break-even      tokens per process and step at which N processes become faster than the fewest. An estimate
                that takes computation as proportional to the tokens, c seconds each, and communication as
                constant, f seconds a step; then T tokens take c0 T + f0 = c T + f
bandwidth       algorithm: bytes / time; bus: that times 2 (N - 1) / N, the traffic of a ring on each link
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from narrowgauge.system.t_interval import interval

_BUSY = 0.2  # the share of a step without a core beyond which times say nothing


@dataclass(frozen=True)
class Row:
    """Figures of one number of processes in one mode: times of the slowest process, mean shares of all."""

    mode: str  # strong or weak
    processes: int
    threads: int  # per process
    batch_size: int  # sequences a step, of all processes
    micro_batch_size: int
    tokens_a_step: int
    steps: int  # number of measured steps
    step_ms: float  # the geometric mean of `round_ms`
    round_ms: tuple[float, ...]  # the median of each round
    step_ms_best: float  # the step least disturbed by other programs
    on_core_ms: float  # time of a step on a core, for the training thread; other programs hardly affect it
    communication: float
    starved: float  # the share of a step in which a process was ready but other work had its core
    sent_bytes: Mapping[str, int]  # per step by the first process, by purpose
    collectives: Mapping[str, int]
    speed_up: float = 1.0
    speed_up_interval: tuple[float, float] | None = None  # 95 %; None: one round, or nothing to compare with
    efficiency: float = 1.0
    break_even_tokens: float | None = None  # None: never, or nothing to compare with

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of all processes together."""
        return 1000 * self.tokens_a_step / self.step_ms

    @property
    def waiting_ms(self) -> float:
        """Milliseconds of communication in a step."""
        return self.communication * self.step_ms

    def as_json(self) -> dict[str, Any]:
        """The fields of the row in scaling.json."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s, "communication_ms": self.waiting_ms}


def of_rounds(rounds: Sequence[Sequence[Mapping[str, Any]]], processes: int) -> dict[str, Any]:
    """The measured fields of a row, from each rank's timings in each round."""
    slowest = [max(ranks, key=lambda rank: statistics.median(rank["seconds"])) for ranks in rounds]
    medians = [1000 * statistics.median(one["seconds"]) for one in slowest]
    waiting, starved = (
        statistics.mean(statistics.median(rank[key]) for ranks in rounds for rank in ranks)
        for key in ("waiting", "starved")
    )
    return {
        "steps": sum(len(one["seconds"]) for one in slowest),
        "step_ms": statistics.geometric_mean(medians),
        "round_ms": tuple(medians),
        "step_ms_best": 1000 * min(min(one["seconds"]) for one in slowest),
        "on_core_ms": 1000 * statistics.median(x for one in slowest for x in one["on_core"]),
        "communication": min(max(waiting, 0.0), 1.0) if processes > 1 else 0.0,
        "starved": starved,
        "sent_bytes": rounds[0][0]["sent"],
        "collectives": rounds[0][0]["calls"],
    }


def against(row: Row, fewest: Row, weak: Mapping[int, Row]) -> Row:
    """The row with its comparison to the fewest processes; the break-even comes from the weak rows."""
    if row is fewest:
        return row
    more_tokens = row.tokens_a_step / fewest.tokens_a_step
    of_rounds = [more_tokens * few / ms for few, ms in zip(fewest.round_ms, row.round_ms, strict=True)]
    found = interval([math.log(one) for one in of_rounds])
    speed_up = row.tokens_per_s / fewest.tokens_per_s
    return replace(
        row,
        speed_up=speed_up,
        speed_up_interval=(math.exp(found.low), math.exp(found.high)) if len(of_rounds) > 1 else None,
        efficiency=speed_up * fewest.processes / row.processes,
        break_even_tokens=break_even(weak[fewest.processes], weak[row.processes]),
    )


def break_even(fewest: Row, row: Row) -> float | None:
    """Break-even in tokens per process and step; 0: at any number; None: never."""
    computing, gained = ((one.step_ms - one.waiting_ms) / one.tokens_a_step for one in (fewest, row))
    gain = computing - gained
    extra = row.waiting_ms - fewest.waiting_ms
    return max(extra, 0.0) / gain / row.processes if gain > 0 else None


def bandwidth(rounds: Sequence[Mapping[str, float]], processes: int) -> dict[str, float]:
    """The bytes, milliseconds and bytes/s of an all-reduce, from its bytes and seconds in each round."""
    size, seconds = rounds[0]["bytes"], statistics.median(one["seconds"] for one in rounds)
    speed = size / seconds
    speeds = {"algorithm_bandwidth": speed, "bus_bandwidth": 2 * (processes - 1) / processes * speed}
    return {"processes": processes, "bytes": size, "ms": 1000 * seconds} | speeds


def warnings(rows: Sequence[Row], cores: int, on_cpu: bool) -> list[str]:
    """Warnings: more processes are slower than fewer, or there are more threads than cores."""
    messages = []
    for mode in ("strong", "weak"):
        for fewer, more in pairwise(row for row in rows if row.mode == mode):
            if more.tokens_per_s < fewer.tokens_per_s:
                messages.append(
                    f"{more.processes} processes are slower than {fewer.processes} ({mode}: "
                    f"{more.tokens_per_s / fewer.tokens_per_s:.2f}x)"
                )
    most = max(rows, key=lambda row: row.processes)
    if on_cpu and most.processes * most.threads > cores:
        messages.append(
            f"{most.processes} processes with {most.threads} thread(s) each take turns on {cores} core(s)"
        )
    elif (share := max(row.starved for row in rows)) > 0.05:
        messages.append(
            f"the processes waited for a core for {share:.0%} of a step: the figures of a busy machine"
        )
    return messages


def compared(rows: Sequence[Row], cores: int, on_cpu: bool, same_cores: bool) -> str:
    """A sentence on what the speed-up compares: more hardware, or the same cores divided more finely."""
    strong = [row for row in rows if row.mode == "strong"]
    threads = ", ".join(f"{row.processes}: {row.threads}" for row in strong)
    threads_text = (
        f"threads of each process, by their number: {threads}; this process may use {cores} core(s)"
    )
    if not on_cpu:
        return f"each process has a GPU to itself; {threads_text}"
    if same_cores:
        return (
            f"{threads_text}: all use the same cores, so more processes are the same machine in more pieces"
        )
    return f"{threads_text}: more processes are more cores"


def verdict(rows: Sequence[Row], same_cores: bool) -> str:
    """What the most processes gain over the fewest, what proves it, and what to do."""
    strong = [row for row in rows if row.mode == "strong"]
    fewest, most = strong[0], strong[-1]
    if most is fewest:
        return f"only {processes(most.processes)} measured; name more with --procs to compare"
    weak = next(row for row in rows if row.mode == "weak" and row.processes == most.processes)
    one = "one" if fewest.processes == 1 else str(fewest.processes)
    return (
        f"{processes(most.processes)} are {most.speed_up:.2f}x as fast as {one} on the same batch"
        f"{_between(most)}: {_proof(most)}. With a batch for each they do {weak.speed_up:.2f}x the work"
        f"{_between(weak)}. {100 * most.communication:.0f} % of a step is communication; "
        f"{_advice(most, weak, same_cores)}."
    )


def _between(row: Row) -> str:
    """The interval of a speed-up, in brackets."""
    if row.speed_up_interval is None:
        return ""
    low, high = row.speed_up_interval
    return f" (95 % interval {low:.2f} .. {high:.2f})"


def _proof(row: Row) -> str:
    """What the interval of a speed-up proves."""
    if row.starved > _BUSY:
        return "no proof, because other programs used the cores"
    if row.speed_up_interval is None:
        return "no proof, because one round has no interval"
    low, high = row.speed_up_interval
    if low <= 1 <= high:
        return "no proof, because the interval includes 1; take more --rounds"
    return "faster, because the interval is above 1" if low > 1 else "slower, because the interval is below 1"


def _advice(strong: Row, weak: Row, same_cores: bool) -> str:
    if strong.starved > _BUSY:
        return "measure again when the cores are free"
    if strong.communication > 0.1 and weak.communication < 0.8 * strong.communication:
        return "larger micro-batches would help"
    if strong.communication > 0.1:
        return "larger batches would not help, a faster connection would"
    if strong.efficiency > 0.8:
        return "more processes may be worth a try"
    if same_cores:
        return "they share the cores that fewer had, so that no more was to be won"
    return "the pieces of the work are small: larger micro-batches would help"


def processes(number: int) -> str:
    """A number of processes, in words."""
    return f"{number} process" + ("es" if number != 1 else "")
