"""The arithmetic of a CPU: the number of threads, and the faster precision for matmuls of bf16 values.

oneDNN reports whether a CPU has bf16 matmul instructions, but not whether they are fast: a CPU with
AVX512-BF16 and no AMX multiplied in bf16 at 0.087 TFLOP/s where fp32 reached 0.167
(docs/lab-log-archive.md). Either way the values are those of bf16 and sums are kept in fp32; only the order
of the sums differs, and so may the last digit of a loss. That is why a resumed run keeps its choice on any
CPU, and why all ranks share it.

    1. a resumed run            the choice recorded at its start; oneDNN's if none was recorded
    2. NARROWGAUGE_PRODUCTS     bf16, fp32, or onednn: as oneDNN reports
    3. otherwise                the faster of one matmul of each kind, timed once for a machine and torch, and
                                kept in the cache
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from narrowgauge.distributed import Coordinator
from narrowgauge.errors import UserError
from narrowgauge.files import cache_directory, make_directory, write_whole
from narrowgauge.kernels import choose_products
from narrowgauge.runs.choices import PRODUCTS
from narrowgauge.runs.monitor.hardware import device_name
from narrowgauge.runs.monitor.threads import threads_of
from narrowgauge.runs.monitor.yardstick import fastest_tries
from narrowgauge.torch_compat import cpu_multiplies_bf16

_SIZE = 512  # of the square matrices that are timed


def choose_arithmetic(
    pinned: int,
    lines: Callable[[], Sequence[Mapping[str, Any]]],
    device: torch.device,
    coordinator: Coordinator,
    log: Callable[[str], None],
) -> str:
    """Set a CPU's threads and the precision of its matmuls. Collective.

    Args:
        pinned: `training.threads`; 0 for as many as are free.
        lines: Reads the run's metrics, which record its first choice.
        device: The device. On a GPU there is nothing to choose: the recipe sets the precision.
        coordinator: Coordinates the ranks; rank 0 chooses.
        log: Prints a line about the choice if it differs from torch's.

    Returns:
        The precision, "bf16" or "fp32"; "" on a GPU.
    """
    choice: tuple[str, int, str] = ("", pinned or torch.get_num_threads(), "")
    if device.type == "cpu":
        if coordinator.rank == 0:
            recorded = lines()
            threads, words = threads_of(recorded, pinned)
            torch.set_num_threads(threads)  # the matmuls are timed with this number
            choice = (products_of(recorded), threads, words)
        choice = coordinator.broadcast(choice)
    name, threads, words = choice
    torch.set_num_threads(threads)
    choose_products(name)
    if words:
        log(words)
    return name


def products_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """The choice of a run, "bf16" or "fp32": recorded in its metrics, or made now for a new run.

    Raises:
        UserError: NARROWGAUGE_PRODUCTS has another value.
    """
    if recorded := [str(line["products"]) for line in lines if "products" in line]:
        return recorded[-1]
    asked = os.environ.get(PRODUCTS, "")
    if asked not in ("", "bf16", "fp32", "onednn"):
        raise UserError(f"{PRODUCTS}={asked} must be bf16, fp32 or onednn; unset it to have it measured")
    if asked == "onednn" or any(line.get("event") == "start" for line in lines):
        return "bf16" if cpu_multiplies_bf16() else "fp32"
    return asked or measured_products()


def measured_products() -> str:
    """The faster precision for this machine and torch: from the cache, or measured now."""
    if not cpu_multiplies_bf16():
        return "fp32"
    cpu = torch.device("cpu")
    parts = (platform.node(), device_name(cpu), torch.__version__)
    entry = cache_directory() / "products" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(entry.read_text(encoding="utf-8"))["products"]
        if kept in ("bf16", "fp32"):
            return str(kept)
    seconds = {d: fastest_tries(_SIZE, cpu, d)[0] for d in (torch.bfloat16, torch.float32)}
    chosen = "bf16" if seconds[torch.bfloat16] <= seconds[torch.float32] else "fp32"
    flops = {str(d).removeprefix("torch."): 2 * _SIZE**3 / s for d, s in seconds.items()}
    with suppress(OSError):
        make_directory(entry.parent)
        write_whole(entry, json.dumps({"products": chosen, "flops": flops}))
    return chosen
