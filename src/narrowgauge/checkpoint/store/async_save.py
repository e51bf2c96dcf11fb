"""Saving beside the steps: a step waits for the copy into memory, the disk is the background's business.

    step n        | snapshot |  step n+1  |  step n+2  |  step n+3 ...
    background               | check, write, hash, sync, publish, retain |

The snapshot is a copy on the CPU of what this rank has to write, into buffers that are kept from save to
save, so that later updates do not touch it. One save at a time: the next waits for the one that is under way,
so a disk that is too slow slows the run and never fills its memory. How a save ended is known on all ranks
alike, and told on all at the same moment: at the next `save` or `wait`.

The ranks agree on a process group of their own, so that nothing here meets the collectives of training.
"""

import copy
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from narrowgauge.checkpoint.store.nonfinite import JSON, Tensors
from narrowgauge.checkpoint.store.save import plan_save, write_share
from narrowgauge.checkpoint.store.slices import LocalTensors

NICE = 10  # the background gives way to the steps where both want a core


class AsyncSaver:
    """Saves of one run in the background; a context manager that waits for the last one.

    Made by all ranks together, after torch.distributed is initialised if there are several.

    Args:
        timeout: how long a rank waits for another in the background; None = torch's own.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if several else None
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_give_way)
        self._pending: Future[Path] | None = None
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def __enter__(self) -> "AsyncSaver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        directory: Path,
        step: int,
        pieces: LocalTensors,
        state: Mapping[str, JSON],
        keep: int,
        run_id: str,
    ) -> None:
        """Begin what `save_distributed` does, and return when tensors and state may change again.

        Waits for the save that is under way. Raises, before anything is begun, what that one raised; called
        again it then begins.
        """
        self.wait()
        planned = plan_save(directory, step, pieces, copy.deepcopy(dict(state)), keep, run_id, self._group)
        self._pending = self._thread.submit(write_share, replace(planned, share=self._copy(planned.share)))

    def wait(self) -> Path | None:
        """Wait for the save that is under way; its path, None without one. Raises what it raised."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for the last save and end the background. Raises what it raised."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers.clear()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
                self._group = None

    def _copy(self, share: Tensors) -> Tensors:
        """The tensors as they are now, in memory that nobody else writes."""
        copies = {
            group: {key: self._copied(group, key, tensor.detach()) for key, tensor in named.items()}
            for group, named in share.items()
        }
        if any(tensor.is_cuda for named in share.values() for tensor in named.values()):
            torch.cuda.current_stream().synchronize()
        return copies

    def _copied(self, group: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((group, key))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[group, key] = buffer
        if tensor.dtype.itemsize == 1:  # bytes are copied as they are, FP4 pairs too
            buffer.view(torch.uint8).copy_(tensor.view(torch.uint8), non_blocking=True)
        else:
            buffer.copy_(tensor, non_blocking=True)
        return buffer


def _give_way() -> None:
    """Lower the priority of this thread alone, which only Linux has."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
