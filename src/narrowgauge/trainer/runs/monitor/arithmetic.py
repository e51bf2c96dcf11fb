"""The arithmetic of a CPU: the number of threads, the faster precision for matmuls of bf16 values, and the
faster way to compute attention.

**Threads.** All threads of an operation wait for the last one. While another program is running, one of them
often has no core, and each of the thousand operations of a step waits for it: with one of two cores taken, a
step with two threads took 3.7 times as long as on quiet cores, and one with one thread 2.0 times
(`benchmarks/busy.py`, experiments/LOG.md). Sums are split into a part for each thread, so the number of
threads affects the last digits of a loss. That is why a configuration may pin it, and a resumed run keeps it:

    1. training.threads    a key of the configuration; threads in excess of the cores take turns
    2. OMP_NUM_THREADS     set by the user, or by torchrun for several processes
    3. a resumed run       the number recorded at its start, if this machine has enough cores
    4. otherwise           the cores that no other program uses, at least one

**Precision and attention.** oneDNN reports whether a CPU has bf16 matmul instructions, but not whether they
are fast: a CPU with AVX512-BF16 and no AMX multiplied in bf16 at 0.087 TFLOP/s where fp32 reached 0.167
(experiments/LOG.md). Either way values are bf16 and sums are kept in fp32; only the order of the sums
differs, and so may the last digit of a loss. The same holds for attention. That of bf16 values is torch's, or
"in-order", which has the same digits on every CPU (`kernels.attention_in_order`); that of fp16 values is
torch's, or in "fp32", which took an AMD EPYC a fifth to a seventh of the time. That is why a resumed run
keeps its choices on any CPU, and why all ranks share them.

    1. a resumed run            the choice recorded at its start; if none was recorded, oneDNN's and torch's
    2. NARROWGAUGE_PRODUCTS     bf16, fp32, or onednn: as oneDNN reports
       NARROWGAUGE_ATTENTION    in-order, fp32 or torch
    3. otherwise                the faster one, timed once for a machine and torch, and kept in the cache.
                                Attention is timed for its shape and dtype, and torch's is taken only if it
                                is faster by a fifth, so that a close race does not depend on the moment
"""

import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from narrowgauge.kernels import choose_attention, choose_products
from narrowgauge.kernels.attention import attend
from narrowgauge.kernels.attention_in_order import LANES, has_c
from narrowgauge.nn import DTYPES
from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_entry, write_cached
from narrowgauge.system.operating_system import cores_of_others
from narrowgauge.system.torch_compat import cpu_multiplies_bf16
from narrowgauge.trainer.distributed import Coordinator
from narrowgauge.trainer.runs.choices import ATTENTION, PRODUCTS
from narrowgauge.trainer.runs.monitor.hardware import device_name
from narrowgauge.trainer.runs.monitor.yardstick import fastest, fastest_tries
from narrowgauge.trainer.training.config.config import Config

_DIGITS = "so that its last digits may differ from a run that was never stopped"
_SIZE = 512  # of the square matrices that are timed
_HEADS, _LONGEST = 4, 1024  # of the attention that is timed
WAYS = ("in-order", "fp32", "torch")  # of computing attention
#: The variable and the values of each choice; the last is what oneDNN or torch would do.
_CHOICES = {"products": (PRODUCTS, ("bf16", "fp32", "onednn")), "attention": (ATTENTION, WAYS)}
_CLEARLY = 1.2  # torch's attention is chosen if it is this much faster
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the time of attention depends on: head_dim, the tokens of a sequence, and the dtype of values.

    `dtype` is the `compute` of a recipe: "bf16", "fp16" or "fp32".
    """

    head_dim: int
    tokens: int
    dtype: str = "bf16"

    @classmethod
    def of(cls, config: Config) -> "AttentionShape":
        """The attention of a run."""
        return cls(config.spec.model.head_dim, config.data.sequence_length, config.spec.recipe.compute)

    @property
    def alternative(self) -> str:
        """The way of computing it that competes with torch's; "" without any."""
        if self.dtype == "fp16":
            return "fp32"
        return "in-order" if self.head_dim % LANES == 0 and has_c() else ""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The choices for a CPU; "" on a GPU, where the recipe decides."""

    products: str = ""  # the precision of matmuls of bf16 values: "bf16" or "fp32"
    attention: str = ""  # how attention is computed: "in-order", "fp32" or "torch"

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], shape: AttentionShape) -> "Arithmetic":
        """The choices of a run, recorded in its metrics, or made now for a new run."""
        products = choice_of("products", lines, measured_products)
        choose_products(products)  # torch's attention is timed with it
        return cls(products, choice_of("attention", lines, lambda: measured_attention(shape)))

    @property
    def facts(self) -> dict[str, str]:
        """The choices as a start event records them."""
        return {"products": self.products, "attention": self.attention} if self.products else {}

    def choose(self) -> None:
        """Compute by these choices from now on."""
        choose_products(self.products)
        choose_attention(self.attention)


NO_CHOICE = Arithmetic()


def choose_arithmetic(
    pinned: int,
    shape: AttentionShape,
    lines: Callable[[], Sequence[Mapping[str, Any]]],
    device: torch.device,
    coordinator: Coordinator,
    log: Callable[[str], None],
) -> Arithmetic:
    """Set a CPU's threads, the precision of its matmuls, and its attention. Collective.

    Rank 0 chooses, and logs a line about a choice that differs from torch's. On a GPU there is nothing to
    choose: the recipe sets the precision.

    Args:
        pinned: `training.threads`; 0 for as many as are free.
        lines: Reads the run's metrics, which record its first choice.
    """
    found: tuple[str, str, int, str] = ("", "", pinned or torch.get_num_threads(), "")
    if device.type == "cpu":
        if coordinator.rank == 0:
            recorded = lines()
            threads, words = threads_of(recorded, pinned)
            torch.set_num_threads(threads)  # the matmuls are timed with this number
            chosen = Arithmetic.of(recorded, shape)
            found = (chosen.products, chosen.attention, threads, words)
        found = coordinator.broadcast(found)
    products, attention, threads, words = found
    torch.set_num_threads(threads)
    chosen = Arithmetic(products, attention)
    chosen.choose()
    if words:
        log(words)
    if attention == "in-order" and not has_c():
        log(
            "attention is computed term by term in torch, with the digits of the C in which this run began, "
            "and slowly: C passes need a C compiler, and NARROWGAUGE_KERNELS must not be 0"
        )
    return chosen


def choice_of(what: str, lines: Sequence[Mapping[str, Any]], measure: Callable[[], str]) -> str:
    """One of a run's `_CHOICES`: recorded in its metrics, or made now for a new run."""
    if recorded := [str(line[what]) for line in lines if line.get(what)]:
        return recorded[-1]
    variable, known = _CHOICES[what]
    asked = os.environ.get(variable, "")
    if asked not in ("", *known):
        names = f"{', '.join(known[:-1])} or {known[-1]}"
        raise UserError(f"{variable}={asked} must be {names}; unset it to have it measured")
    if any(line.get("event") == "start" for line in lines):  # from before it was recorded
        asked = known[-1]
    if asked == "onednn":
        return "bf16" if cpu_multiplies_bf16() else "fp32"
    return asked or measure()


def measured_attention(shape: AttentionShape) -> str:
    """The faster attention for this machine, torch, shape and dtype: cached, or measured now."""
    if not (other := shape.alternative):
        return "torch"
    facts = (shape.head_dim, shape.tokens, other)
    return _faster("attention", other, "torch", lambda way: _attention_seconds(way, shape), _CLEARLY, *facts)


def _attention_seconds(way: str, shape: AttentionShape) -> float:
    """The shortest time of attention, forward and backward, of one sequence on one thread."""
    size = (1, _HEADS, min(shape.tokens, _LONGEST), shape.head_dim)
    dtype = torch.float16 if shape.dtype == "fp16" else torch.bfloat16
    x, threads = torch.linspace(-1, 1, math.prod(size)).view(size).to(dtype), torch.get_num_threads()
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    torch.set_num_threads(1)
    choose_attention(way)
    try:
        return fastest(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), x), x.device)[0]
    finally:
        choose_attention("")
        torch.set_num_threads(threads)


def measured_products() -> str:
    """The faster precision for this machine and torch: cached, or measured now."""
    if not cpu_multiplies_bf16():
        return "fp32"
    return _faster("products", "bf16", "fp32", lambda way: fastest_tries(_SIZE, _CPU, DTYPES[way])[0])


def _faster(
    what: str, first: str, second: str, seconds: Callable[[str], float], clearly: float = 1.0, *facts: object
) -> str:
    """The second of two ways if it is faster by a factor, else the first: cached, or measured now."""
    entry = cache_entry(what, platform.node(), device_name(_CPU), torch.__version__, *facts)
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(entry.read_text(encoding="utf-8"))[what]
        if kept in (first, second):
            return str(kept)
    took = {way: seconds(way) for way in (first, second)}
    chosen = second if clearly * took[second] < took[first] else first
    write_cached(entry, {what: chosen, "seconds": took})
    return chosen


@cache
def threads_of_torch() -> int:
    """torch's default, before a run in this process has set another number."""
    return torch.get_num_threads()


def threads_of(lines: Sequence[Mapping[str, Any]], pinned: int = 0) -> tuple[int, str]:
    """The number of threads of a run with these metrics, and a line about it; `pinned` is a set one, or 0."""
    here = pinned or threads_of_torch()
    recorded = next((int(line["threads"]) for line in reversed(lines) if "threads" in line), here)
    resumes = any(line.get("event") == "start" for line in lines)
    is_set = bool(os.environ.get("OMP_NUM_THREADS"))
    if resumes and recorded != here and (pinned or is_set or recorded > here):
        return here, f"threads: {here}, and the run had {recorded}, {_DIGITS}"
    if pinned or resumes:
        number, origin = pinned or recorded, "before" if resumes else "configured"
        return number, f"threads: {number}, as {origin}"
    others = 0.0 if is_set else cores_of_others()
    free = min(here, max(1, round(here - others)))
    busy = f" of {here}, since other programs use {others:.1f} cores" if free != here else ""
    return free, f"threads: {free}{busy}; the last digits depend on it, and --training.threads N pins it"
