"""Two processes exchange tensors, by NCCL on two GPUs or by gloo; what arrives is compared.

Gradients are summed, codes gathered. Sums are of small whole numbers, so they are exact in any order.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from narrowgauge.system.torch_compat import all_gather_single, reduce_scatter_single

PROCESSES, MOST_S = 2, 120
_NUMBERS = 2**20
_TIMED, _TRIES = 2**26, 4  # fp32 values of the sum that is timed; the first try is not counted


def exchange(rank, store, kind, is_faulty=False):
    """Join the other process and exchange; on GPUs, write the seconds of a large sum next to the store."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=MOST_S),
    )
    try:
        _compare(rank, device, is_faulty)
        if kind == "cuda" and rank == 0:
            store.with_suffix(".ms").write_text(f"{1e3 * _seconds(device):.1f}")
        elif kind == "cuda":
            _seconds(device)
    finally:
        dist.destroy_process_group()


def _compare(rank, device, is_faulty):
    numbers = torch.arange(_NUMBERS, device=device) % 100
    for dtype in (torch.float32, torch.bfloat16):
        total = (numbers + rank + is_faulty).to(dtype)
        dist.all_reduce(total)
        assert bool((total == 2 * numbers + 1).all()), f"a sum in {dtype} is wrong"
    gathered = torch.empty(2 * _NUMBERS, dtype=torch.uint8, device=device)
    all_gather_single(gathered, (numbers + rank).to(torch.uint8))
    assert torch.equal(gathered, torch.cat([numbers, numbers + 1]).to(torch.uint8)), "codes are wrong"
    if device.type == "cuda":
        share = torch.empty(_NUMBERS // 2, dtype=torch.float32, device=device)
        reduce_scatter_single(share, (numbers + rank).float())
        assert torch.equal(share, (2 * numbers.chunk(2)[rank] + 1).float()), "a scattered sum is wrong"


def _seconds(device):
    x, taken = torch.zeros(_TIMED, dtype=torch.float32, device=device), []
    for _ in range(_TRIES):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(x)
        torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
