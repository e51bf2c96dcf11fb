"""The arithmetic of a CPU: how many threads, and in which precision it multiplies; equal on all ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from narrowgauge.distributed import Coordinator
from narrowgauge.kernels import choose_products
from narrowgauge.runs.monitor.products import products_of
from narrowgauge.runs.monitor.threads import threads_of


def choose_arithmetic(
    pinned: int,
    lines: Callable[[], Sequence[Mapping[str, Any]]],
    device: torch.device,
    coordinator: Coordinator,
    log: Callable[[str], None],
) -> str:
    """Set a CPU's threads and the precision of its matmuls. Collective.

    Args:
        pinned: `training.threads`; 0: as many as are free.
        lines: Reads the metrics of the run, which keeps what it began with.
        device: The device. A GPU takes neither: its recipe says the precision.
        coordinator: Of the ranks; rank 0 chooses.
        log: Prints a line about the choice, where it differs from torch's.

    Returns:
        The precision, "bf16" or "fp32"; "" on a GPU.
    """
    choice: tuple[str, int, str] = ("", pinned or torch.get_num_threads(), "")
    if device.type == "cpu":
        if coordinator.rank == 0:
            recorded = lines()
            threads, words = threads_of(recorded, pinned)
            torch.set_num_threads(threads)  # the matmuls are timed with them
            choice = (products_of(recorded), threads, words)
        choice = coordinator.broadcast(choice)
    name, threads, words = choice
    torch.set_num_threads(threads)
    choose_products(name)
    if words:
        log(words)
    return name
