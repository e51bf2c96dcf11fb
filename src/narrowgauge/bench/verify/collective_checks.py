"""Collectives: two processes exchange tensors, by NCCL on two GPUs of a machine, by gloo on a CPU.

Gradients are summed, codes gathered. Sums are of small whole numbers, so they are exact in any order.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from narrowgauge.bench.verify.check import Check, Disagreement
from narrowgauge.processes import Answering, Ended, Late
from narrowgauge.torch_compat import all_gather_single, reduce_scatter_single

DO = "train on one GPU; set NCCL_DEBUG=INFO to see why, and please report it with this file"
_PROCESSES, _SECONDS = 2, 120.0
_NUMBERS = 2**20
_TIMED, _TRIES = 2**26, 4  # fp32 values of the sum that is timed; the first try is not counted
_DTYPES = (torch.float32, torch.bfloat16)


def collective_checks(device: torch.device) -> list[Check]:
    """The check of a device."""
    is_alone = device.type == "cuda" and torch.cuda.device_count() < _PROCESSES
    return [Check("collectives", "two processes", _exchange, DO, "it takes a second GPU" * is_alone)]


def _exchange(device: torch.device) -> str:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        joined = []
        for rank in range(_PROCESSES):
            joined.append(Answering(_exchanging, rank, Path(folder, "store"), device.type))
            stack.callback(joined[-1].end)
        try:
            words = [str(process.ask(None, _SECONDS)) for process in joined]
        except Ended as error:
            raise Disagreement(error.traceback.strip().rpartition("\n")[2] or str(error)) from None
        except Late:
            raise Disagreement(f"the processes did not answer within {_SECONDS:g} seconds") from None
    return words[0]


@contextmanager
def _exchanging(rank: int, store: Path, kind: str) -> Iterator[Callable[[None], str]]:
    """Join the other process, exchange, and yield a function that returns how it went."""
    is_gpu = kind == "cuda"
    device = torch.device(kind, rank) if is_gpu else torch.device(kind)
    if is_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if is_gpu else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=_PROCESSES,
        timeout=timedelta(seconds=_SECONDS),
    )
    try:
        words = f"by {backend}, exact{_compared(rank, device)}"
        yield lambda _: words
    finally:
        dist.destroy_process_group()


def _compared(rank: int, device: torch.device) -> str:
    """Compare what arrives with what it has to be; on GPUs, the speed of a sum as a clause.

    Raises:
        Disagreement: A value differs.
    """
    numbers = torch.arange(_NUMBERS, device=device) % 100
    for dtype in _DTYPES:
        total = (numbers + rank).to(dtype)
        dist.all_reduce(total)
        _require(bool((total == 2 * numbers + 1).all()), f"a sum in {dtype}")
    codes = (numbers + rank).to(torch.uint8)
    gathered = torch.empty(2 * _NUMBERS, dtype=torch.uint8, device=device)
    all_gather_single(gathered, codes)
    expected = torch.cat([numbers, numbers + 1]).to(torch.uint8)
    _require(torch.equal(gathered, expected), "gathered codes")
    if device.type != "cuda":
        return ""
    share = torch.empty(_NUMBERS // 2, dtype=torch.float32, device=device)
    reduce_scatter_single(share, (numbers + rank).float())
    own = numbers.chunk(2)[rank]
    _require(torch.equal(share, (2 * own + 1).float()), "a sum that is scattered")
    return f"; a sum of {_TIMED * 4 >> 20} MiB takes {1e3 * _seconds(device):.1f} ms"


def _seconds(device: torch.device) -> float:
    x, taken = torch.zeros(_TIMED, dtype=torch.float32, device=device), []
    for _ in range(_TRIES):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(x)
        torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Disagreement(f"{what} is wrong")
