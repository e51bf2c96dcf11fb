"""The machine of a run: its device and memory; free cores, the faster arithmetic of a CPU, its peak.

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

**The yardstick of MFU.** MFU is a share of a peak, so two runs can be compared only if both use the same
peak. A measurement of milliseconds depends on what else the machine does at that moment. So the fastest
matmul is repeated until the three fastest tries agree, and the result is kept in the cache
(`NARROWGAUGE_CACHE`): later runs on this machine with the same device, number of threads and torch use it. If
the tries do not agree, the run reports no MFU: a figure that may change within half a minute is worse than
none. On a CPU the yardstick is the faster of float32 and bfloat16 for every recipe: which one is
faster depends on the processor, and a machine has one peak. On a GPU it is that of the recipe's dtype.
"""

import ctypes
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

import torch

from narrowgauge.kernels import choose_attention, choose_products
from narrowgauge.kernels.attention import attend
from narrowgauge.kernels.attention_in_order import LANES, has_c
from narrowgauge.nn import DTYPES
from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import cache_entry, write_cached
from narrowgauge.system.operating_system import cores_of_others, peak_memory_held
from narrowgauge.system.torch_compat import cpu_multiplies_bf16
from narrowgauge.trainer.distributed import Coordinator
from narrowgauge.trainer.runs.choices import ATTENTION, PRODUCTS
from narrowgauge.trainer.training.config.config import Config

DEVICES = ("auto", "cpu", "cuda")
# Segments that grow lose less memory between blocks of different sizes; a user's own choice stands.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_GPUS = ("gpu", "nvidia", "amd", "hip", "rocm")  # other names of what torch calls cuda

# Options of <malloc.h>: how much freed memory returns to the kernel, and what is mapped outside the heap.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEEP_FREED = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 2**26}
_DEFAULTS = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 2**17, _M_TOP_PAD: 2**17}


def choose_device(requested: str) -> torch.device:
    """The device of "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", requested):
        if requested.partition(":")[0].lower() in _GPUS:
            raise UserError(
                f"unknown device {requested!r}; a GPU of NVIDIA or AMD is 'cuda', the second 'cuda:1'"
            )
        raise unknown("device", requested, DEVICES)
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"training.device = {requested!r}, but this torch ({torch.__version__}) sees no GPU; "
            "use --device cpu, or install a torch built for this machine's GPU"
        )
    device = torch.device(requested)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"training.device = {requested!r}, but the last GPU that torch sees here is "
            f"'cuda:{torch.cuda.device_count() - 1}'; name that or one before it"
        )
    return device


def use_device(device: torch.device, deterministic: bool = False) -> None:
    """Make `device` the current device, and require fp32 accumulation.

    By default torch lets a GPU add the parts of a split matmul, such as a weight gradient over many tokens,
    in 16 bits.

    Args:
        device: The device.
        deterministic: Whether a GPU uses only kernels that are bitwise reproducible. An error, not only a
            warning, since flash-attention's backward pass would not repeat. `torch_compat.not_strict` is
            for operations that torch refuses although the part in use is reproducible.
    """
    if device.type != "cuda":
        return
    if not any(name in os.environ for name in _ALLOCATOR):  # before memory is first asked for
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    if deterministic:
        workspace = os.environ.setdefault(_CUBLAS, ":4096:8")  # before cuBLAS is first used
        if workspace not in (":4096:8", ":16:8"):
            raise UserError(
                f"training.deterministic = true, but {_CUBLAS} is {workspace!r}, with which cuBLAS does "
                "not repeat every bit; unset it, or set it to ':4096:8'"
            )
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def total_memory(device: torch.device) -> int:
    """Bytes of the GPU's memory, or of the machine's for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_at_peak(device: torch.device) -> dict[str, int]:
    """The most bytes that this process has held: allocated by tensors, and reserved by torch's allocator.

    On a CPU both describe the process.
    """
    if device.type != "cuda":
        return dict.fromkeys(("allocated", "reserved"), peak_memory_held())
    memory = torch.cuda.memory
    return {
        "allocated": memory.max_memory_allocated(device),
        "reserved": memory.max_memory_reserved(device),
    }


@contextmanager
def memory_kept(device: torch.device) -> Iterator[None]:
    """Keep the memory of freed CPU tensors in the process for later tensors.

    By default glibc returns large freed blocks to the kernel at once, and the kernel clears each page again
    for the next step, which costs a fifth of a step's processor time (docs/performance.md). Keeping the
    memory makes the process a tenth larger. Without glibc this does nothing.
    """
    libc = ctypes.CDLL(None) if device.type == "cpu" and sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    for option, value in _KEEP_FREED.items():
        libc.mallopt(option, value)
    try:
        yield
    finally:
        for option, value in _DEFAULTS.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; on a CPU torch has no error class for that."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def device_name(device: torch.device) -> str:
    """The human-readable name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads != 1)}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work, for timing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


AGREE = 1.1  # the third fastest try takes at most this much longer than the fastest
_LEAST = 5  # tries of one action
_ENOUGH_S, _MOST_S = 0.2, 2.0  # seconds of tries that agree, and of tries that do not
_LARGE = 4  # from this many threads a CPU needs the larger matmul to be busy


@dataclass(frozen=True)
class Yardstick:
    """A peak in FLOP/s, None if it could not be measured reliably, and its description."""

    flops: float | None
    source: str


def yardstick(device: torch.device, dtype: torch.dtype) -> Yardstick:
    """The yardstick of this machine for a device and the dtype of its matmuls: cached, or measured now."""
    facts = (platform.node(), device_name(device), torch.__version__, str(_dtypes(device, dtype)))
    entry = cache_entry("yardsticks", *facts)
    with suppress(OSError, ValueError, TypeError):
        kept = Yardstick(**json.loads(entry.read_text(encoding="utf-8")))
        if isinstance(kept.flops, float) and kept.flops > 0 and isinstance(kept.source, str):
            return kept
    found = measure(device, dtype)
    if found.flops is not None:
        write_cached(entry, asdict(found))
    return found


def measure(device: torch.device, dtype: torch.dtype) -> Yardstick:
    """Measure the fastest square matmul; no figure if the fastest tries do not agree."""
    n = 8192 if device.type == "cuda" else 2048 if torch.get_num_threads() > _LARGE else 512
    tries = {d: fastest_tries(n, device, d) for d in _dtypes(device, dtype)}
    best = min(tries, key=lambda d: tries[d][0])
    name = str(best).removeprefix("torch.")
    if not agree(tries[best]):
        why = f"tries of one {name} matmul differ by more than {AGREE - 1:.0%}: the device is busy"
        return Yardstick(None, f"not measured: {why}")
    flops = 2 * n**3 / tries[best][0]
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    what = f"the fastest {n} x {n} {name} matmul ({device_name(device)}; measured {day})"
    return Yardstick(flops, f"{flops / 1e12:.3g} TFLOP/s, {what}")


def agree(fastest: Sequence[float]) -> bool:
    """Whether the fastest tries, in ascending order, are close to each other."""
    return fastest[-1] <= AGREE * fastest[0]


def fastest_tries(n: int, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Seconds of the three fastest of many matmuls of (n, n) matrices."""
    a = torch.ones(n, n, device=device, dtype=dtype)
    return fastest(partial(torch.mm, a, a, out=torch.empty_like(a)), device)


def fastest(action: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of the three fastest of many calls: a disturbance makes a call longer, never shorter."""
    action()  # the first call chooses a kernel
    found, total, tries = [math.inf] * 3, 0.0, 0
    while tries < _LEAST or total < _ENOUGH_S or (total < _MOST_S and not agree(found)):
        elapsed = seconds(action, device)
        found, total, tries = sorted([*found, elapsed])[:3], total + elapsed, tries + 1
    return found


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """The time of one call, until the device has finished its work."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def _dtypes(device: torch.device, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes whose matmuls are measured."""
    return (dtype,) if device.type == "cuda" else (torch.float32, torch.bfloat16)


_DIGITS = "so that its last digits may differ from a run that was never stopped"
_SIZE = 512  # of the square matrices that are timed
_HEADS, _LONGEST = 4, 1024  # of the attention that is timed
#: The variable and the values of each choice; the last is what oneDNN or torch would do.
_CHOICES = {
    "products": (PRODUCTS, ("bf16", "fp32", "onednn")),
    "attention": (ATTENTION, ("in-order", "fp32", "torch")),
}
_CLEARLY = 1.2  # torch's attention is chosen if it is this much faster
_CPU = torch.device("cpu")

#: The choices for a CPU, as a start event records them: "products" is "bf16" or "fp32", and "attention" is
#: "in-order", "fp32" or "torch". Empty on a GPU, where the recipe decides.
Arithmetic = Mapping[str, str]


def compute_by(arithmetic: Arithmetic) -> None:
    """Apply these choices to this process; none of them: as torch and oneDNN do."""
    choose_products(arithmetic.get("products", ""))
    choose_attention(arithmetic.get("attention", ""))


def arithmetic_of(config: Config, lines: Sequence[Mapping[str, Any]] = ()) -> Arithmetic:
    """The choices of a run: recorded in the lines of its metrics, or made now for a new run."""
    products = choice_of("products", lines, measured_products)
    choose_products(products)  # torch's attention is timed with it
    shape = config.spec.model.head_dim, config.data.sequence_length, config.spec.recipe.compute
    attention = choice_of("attention", lines, lambda: measured_attention(*shape))
    return {"products": products, "attention": attention}


def choose_arithmetic(
    config: Config,
    lines: Callable[[], Sequence[Mapping[str, Any]]],
    device: torch.device,
    coordinator: Coordinator,
    log: Callable[[str], None],
) -> Arithmetic:
    """Set a CPU's threads, the precision of its matmuls, and its attention. Collective.

    Rank 0 chooses, and logs a line about a choice that differs from torch's. On a GPU there is nothing to
    choose: the recipe sets the precision. `lines` reads the run's metrics, which record its first choice.
    """
    pinned = config.training.threads
    threads, words, chosen = pinned or torch.get_num_threads(), "", dict[str, str]()
    if device.type == "cpu":
        if coordinator.rank == 0:
            recorded = lines()
            threads, words = threads_of(recorded, pinned)
            torch.set_num_threads(threads)  # the matmuls are timed with this number
            chosen = dict(arithmetic_of(config, recorded))
        threads, words, chosen = coordinator.broadcast((threads, words, chosen))
    torch.set_num_threads(threads)
    compute_by(chosen)
    if words:
        log(words)
    if chosen.get("attention") == "in-order" and not has_c():
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


def measured_attention(head_dim: int, tokens: int, compute: str = "bf16") -> str:
    """The faster attention for this machine, torch, and the values of a recipe: cached, or measured now.

    Its time depends on `head_dim`, the tokens of a sequence, and the recipe's `compute`.
    """
    if compute != "fp16" and (head_dim % LANES or not has_c()):
        return "torch"
    other = "fp32" if compute == "fp16" else "in-order"
    shape = 1, _HEADS, min(tokens, _LONGEST), head_dim
    dtype = torch.float16 if compute == "fp16" else torch.bfloat16
    facts = head_dim, tokens, other
    return _faster(
        "attention", other, "torch", lambda way: _attention_seconds(way, shape, dtype), _CLEARLY, *facts
    )


def _attention_seconds(way: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """The shortest time of attention, forward and backward, of one sequence on one thread."""
    x, threads = torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype), torch.get_num_threads()
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
