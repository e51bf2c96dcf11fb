"""Asynchronous saves: a step waits only for a copy into memory, and a background thread writes to disk.

    step n        | snapshot |  step n+1  |  step n+2  |  step n+3 ...
    background               | check, write, hash, sync, publish, retain |

The snapshot is a CPU copy of what this rank has to write, in buffers that are reused from save to save, so
later updates do not affect it. There is one save at a time: the next waits for the current one, so a slow
disk slows the run but never fills its memory. All ranks get the same outcome of a save at the same moment: at
the next `save` or `wait`.

The saver uses a separate process group, so that its collectives never mix with training's.
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

from narrowgauge.trainer.checkpoint.store.before_save import JSON, Tensors
from narrowgauge.trainer.checkpoint.store.index import LocalTensors
from narrowgauge.trainer.checkpoint.store.save import SavePlan, plan_save

NICE = 10  # lower priority of the thread, so that training steps get the cores first


class AsyncSaver:
    """Saves of one run in the background; a context manager that waits for the last one.

    All ranks construct it together, after torch.distributed is initialised if there are several.

    Args:
        timeout: How long a rank waits for another in the background; None = torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if several else None
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_lower_priority)
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
        local_tensors: LocalTensors,
        state: Mapping[str, JSON],
        keep: int,
        run_id: str,
    ) -> None:
        """Begin a save; returns when tensors and state may change again. Arguments as for `plan_save`.

        It first waits for the save in progress. If that one failed, its error is raised and nothing is begun;
        the next call begins a save.
        """
        self.wait()
        state = copy.deepcopy(dict(state))
        plan = plan_save(directory, step, local_tensors, state, keep, run_id, self._group)
        self._pending = self._thread.submit(SavePlan.write, replace(plan, tensors=self._copy(plan.tensors)))

    def wait(self) -> Path | None:
        """Wait for the save in progress and raise its error; returns its path, or None if there is none."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for the last save, end the thread, and raise the save's error."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers.clear()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
                self._group = None

    def _copy(self, tensors: Tensors) -> Tensors:
        """The current tensors, in memory that nothing else writes to."""
        copies = {
            group: {key: self._copied(group, key, tensor.detach()) for key, tensor in named.items()}
            for group, named in tensors.items()
        }
        if any(tensor.is_cuda for named in tensors.values() for tensor in named.values()):
            torch.cuda.current_stream().synchronize()
        return copies

    def _copied(self, group: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((group, key))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[group, key] = buffer
        if tensor.dtype.itemsize == 1:  # bytes are copied as they are, including FP4 pairs
            buffer.view(torch.uint8).copy_(tensor.view(torch.uint8), non_blocking=True)
        else:
            buffer.copy_(tensor, non_blocking=True)
        return buffer


def _lower_priority() -> None:
    """Lower the priority of this thread alone; only Linux supports this."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
