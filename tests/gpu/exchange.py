"""Two processes exchange tensors, by NCCL on two GPUs or by gloo; what arrives is compared.

Gradients are summed, codes gathered. Sums are of small whole numbers, so they are exact in any order.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from narrowgauge.system.torch_compat import all_gather_single, reduce_scatter_single

PROCESSES, MOST_S = 2, 120
_NUMBERS = 2**20


def exchange(rank, store, kind):
    """Join the other process and exchange."""
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
        _compare(rank, device)
    finally:
        dist.destroy_process_group()


def _compare(rank, device):
    numbers = torch.arange(_NUMBERS, device=device) % 100
    for dtype in (torch.float32, torch.bfloat16):
        total = (numbers + rank).to(dtype)
        dist.all_reduce(total)
        assert bool((total == 2 * numbers + 1).all()), f"a sum in {dtype} is wrong"
    gathered = torch.empty(2 * _NUMBERS, dtype=torch.uint8, device=device)
    all_gather_single(gathered, (numbers + rank).to(torch.uint8))
    assert torch.equal(gathered, torch.cat([numbers, numbers + 1]).to(torch.uint8)), "codes are wrong"
    if device.type == "cuda":
        share = torch.empty(_NUMBERS // 2, dtype=torch.float32, device=device)
        reduce_scatter_single(share, (numbers + rank).float())
        assert torch.equal(share, (2 * numbers.chunk(2)[rank] + 1).float()), "a scattered sum is wrong"
