"""The processes of the scaling measurement: they take steps of the ordinary `Trainer` and time them.

A step is timed like `step_ms` in the metrics of `train`. Communication is the time in which a process waits
for others, including slower ones; communication that overlaps with computation does not count.

    CPU    the time in which this thread slept: elapsed time, less the time on a core, less the time in which
           it was runnable without a core (/proc/thread-self/schedstat); gloo works in its own threads
    GPU    the time in which only kernels of NCCL ran, measured in a few more steps under torch's profiler

Sources: https://docs.kernel.org/scheduler/sched-stats.html ("/proc/<pid>/schedstat"), and for the bandwidths
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from narrowgauge.distributed import Mesh
from narrowgauge.distributed.byte_counter import CommCounter
from narrowgauge.system.errors import Failed
from narrowgauge.system.processes import depend_on_parent
from narrowgauge.trainer.data import Batch, Dataset, open_data
from narrowgauge.trainer.distributed import START, Coordinator, World, init_process_group
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.runs import OutOfMemory, choose_device
from narrowgauge.trainer.runs.loop.resolve import parallel_dims_of
from narrowgauge.trainer.runs.monitor.machine import is_out_of_memory, memory_kept, synchronize, use_device
from narrowgauge.trainer.runs.monitor.profiler import covered
from narrowgauge.trainer.training import Config
from narrowgauge.trainer.training.step.trainer import Trainer

WARMUP_STEPS = 3  # not measured: allocation, DDP's buckets
LEAST_STEPS = 2  # measured in a round even if they exceed the requested seconds
PROFILED_STEPS = 3
_STORE_IS_THERE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # as under torchrun
LARGEST = 2**28  # bytes of the all-reduce whose bandwidth is measured


def on_processes(size: int, configs: Mapping[str, Config], threads: int, seconds: float) -> dict[str, Any]:
    """Measure each configuration for the given seconds, in `size` processes of this machine.

    This process hosts the store at which they meet, so their port is known to be free.

    Returns:
        For each configuration the result of `_timed` on each rank; and that of `_all_reduce`.

    Raises:
        UserError: A process cannot train it; the others are killed.
        OutOfMemory: The memory does not suffice.
        Failed: A process was killed, or crashed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        with ProcessPoolExecutor(size, get_context("spawn"), depend_on_parent) as pool:
            shared = (size, store.port, configs, threads, seconds)
            ranks = [pool.submit(_measured, rank, *shared) for rank in range(size)]
            pool.submit(int)  # wakes the pool's thread, which from then on watches all processes
            try:
                return next(filter(None, (rank.result() for rank in as_completed(ranks))))
            except BaseException:
                for child in active_children():  # they may wait for each other
                    child.kill()
                raise
    except BrokenProcessPool:
        raise Failed(f"a process of {size} was killed, or crashed") from None


def _measured(
    rank: int, size: int, port: int, configs: Mapping[str, Config], threads: int, seconds: float
) -> dict[str, Any]:
    """What rank 0 found; nothing on others."""
    torch.set_num_threads(threads)
    config = next(iter(configs.values()))
    device = choose_device(config.training.device)
    if device.type == "cuda" and size > 1:
        device = torch.device("cuda", rank)
    use_device(device)
    world = World(rank, size, rank, size, "127.0.0.1", port, device.index or 0)
    joined = init_process_group(world, device, config.training.hang_timeout, environ=_STORE_IS_THERE)
    with memory_kept(device), joined as coordinator:
        dataset = open_data(config.data.source, config.data.tokenizer, config.data.weights)
        mesh = Mesh(parallel_dims_of(config, size), device)
        result: dict[str, Any] = {}
        try:
            for name, one in configs.items():
                gc.collect()  # frees the previous model
                result[name] = _timed(Trainer.begin(one, device, mesh), dataset, coordinator, seconds)
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(
                    f"out of memory with {size} processes; lower training.micro_batch_size or --procs"
                ) from error
            raise
        result |= {"all_reduce": _all_reduce(config, device, coordinator)} if size > 1 else {}
        return result if rank == 0 else {}


def _timed(
    trainer: Trainer, dataset: Dataset, coordinator: Coordinator, seconds: float
) -> list[dict[str, Any]]:
    """Timings per rank: seconds of its steps, shares spent waiting for others or for a core, bytes sent."""
    times, on_core, waiting, starved = [], [], [], []
    with trainer.batches(dataset.train) as loader:
        batches = _Batches(loader)
        for _ in range(WARMUP_STEPS):
            coordinator.progress(f"step {trainer.step + 1}", START)
            trainer.train_step(batches)
        begin, is_late = time.perf_counter(), 0
        while not is_late:
            coordinator.progress(f"step {trainer.step + 1}")
            synchronize(trainer.device)
            start, before, loading = time.perf_counter(), idle(), batches.waited
            trainer.train_step(batches)
            times.append(time.perf_counter() - start)
            asleep, without_core = (b - a for a, b in zip(before, idle(), strict=True))
            on_core.append(times[-1] - asleep - without_core)
            waiting.append((asleep - batches.waited + loading) / times[-1])
            starved.append(without_core / times[-1])
            late = len(times) >= LEAST_STEPS and time.perf_counter() - begin > seconds
            is_late = coordinator.all_reduce_max(late=int(late))["late"]
        if trainer.device.type == "cuda" and coordinator.size > 1:
            waiting = [_share_on_gpu(trainer, batches)]
        traffic = CommCounter()
        if coordinator.size > 1:  # a process alone sends nothing
            with traffic:
                trainer.train_step(batches)
    local = {"seconds": times, "on_core": on_core, "waiting": waiting, "starved": starved}
    return trainer.engine.gather(local | {"sent": dict(traffic.sent), "calls": dict(traffic.calls)})


class _Batches(Iterator[Batch]):
    """Iterator that accumulates the time spent waiting for the loader, which is not communication."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches, self.waited = batches, 0.0

    def __next__(self) -> Batch:
        before = idle()[0]
        batch = next(self._batches)
        self.waited += idle()[0] - before
        return batch


def idle() -> tuple[float, float]:
    """Seconds in which this thread slept, and in which it was ready while something else had the core.

    Both have an arbitrary origin. Where /proc is missing, the second counts as sleep.
    """
    ready = 0.0
    with suppress(OSError):
        # Its first number, the time on a core, lags behind `thread_time` by up to a tick of the scheduler.
        ready = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return time.perf_counter() - time.thread_time() - ready, ready


def _share_on_gpu(trainer: Trainer, batches: Iterator[Batch]) -> float:
    """The share of a few steps in which the GPU only communicated."""
    synchronize(trainer.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            trainer.train_step(batches)
        taken = time.perf_counter() - start
    every: list[tuple[float, float]] = []  # start, end
    compute: list[tuple[float, float]] = []
    for event in profiler.events():
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            every.append((event.time_range.start, event.time_range.end))
            if not event.name.startswith("nccl"):
                compute.append(every[-1])
    return (covered(every) - covered(compute)) / 1e6 / taken


def _all_reduce(config: Config, device: torch.device, coordinator: Coordinator) -> dict[str, float]:
    """Bytes and median seconds of an all-reduce as large as the model's gradients, over all processes."""
    size = min(4 * count_parameters(config.spec.model), LARGEST)
    tensor = torch.zeros(size // 4, device=device)
    times = []
    for _ in range(8):
        coordinator.progress("an all-reduce")
        coordinator.barrier()
        synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = coordinator.all_reduce_max(ns=int(1e9 * statistics.median(times[2:])))["ns"]
    return {"bytes": size, "seconds": slowest / 1e9}
