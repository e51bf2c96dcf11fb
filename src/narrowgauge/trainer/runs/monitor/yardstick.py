"""The yardstick of MFU: the fastest matmul of this machine, measured once and cached.

MFU is a share of a peak, so two runs can be compared only if both use the same peak. A measurement of
milliseconds depends on what else the machine does at that moment. So the matmul is repeated until the three
fastest tries agree, and the result is kept in the cache (`NARROWGAUGE_CACHE`): later runs on this machine
with the same device, number of threads and torch use it. If the tries do not agree, there is no yardstick and
no MFU: a figure that could change by half a minute later is worse than none.

On a CPU the yardstick is the faster of float32 and bfloat16 for every recipe: which one is faster depends on
the processor, and a machine has one peak. On a GPU it is that of the recipe's dtype.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial

import torch

from narrowgauge.system.files import cache_entry, write_cached
from narrowgauge.trainer.runs.monitor.hardware import device_name, synchronize

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
