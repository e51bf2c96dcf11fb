"""The memory of a training step by class of tensor, measured from a step or estimated for one.

    weights, master, gradients, m, v     counted from the tensors themselves
    other                                amax histories of recipes, step counts, buffers
    saved activations                    tensors that a forward pass creates and keeps,
    logits                               except the head's output (none with a chunked loss, whose gradient of
                                         the head counts as a gradient from the forward pass on)
    whole weights                        and except sharded weights that FSDP has gathered
    workspace                            the rest of the peak of a complete optimizer step

A `MemoryTracker` measures a real step, `memory_estimate` simulates one; both end in `measured`, so a plan and
a run always have the same classes. Each process is measured separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.formats import torch_dtype
from narrowgauge.nn import Linear, recipe_tensors
from narrowgauge.nn.weight import WeightGather
from narrowgauge.quantization import local_tensor, plain_gradient, state_of
from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.models import count_parameters
from narrowgauge.trainer.simulate.recorder import Recorder
from narrowgauge.trainer.training.step.trainer import Trainer

STATE = ("weights", "master", "gradients", "m", "v", "other")
_CLASS_OF = {"weight": "weights", "grad": "gradients"}  # other kinds of state have the name of their class
CLASSES = (*STATE, "saved activations", "logits", "whole weights", "workspace")


@dataclass(frozen=True)
class Memory:
    """Bytes by class: on the device, and for state in the host's memory."""

    device: dict[str, int]
    host: dict[str, int]
    parameters: int

    @property
    def peak(self) -> int:
        """Peak bytes on the device."""
        return sum(self.device.values())

    @property
    def state(self) -> int:
        """Bytes on the device between steps."""
        return sum(self.device[name] for name in STATE)

    def classes(self) -> str:
        """The device's bytes by class as text; classes under 64 KiB are left out."""
        return " + ".join(
            f"{name} {human_bytes(size)}" for name, size in self.device.items() if size >= 2**16
        )

    def as_json(self) -> dict[str, Any]:
        """The fields of the event `memory` in the metrics."""
        return {"bytes": self.device, "host_bytes": self.host, "peak": self.peak}


class MemoryTracker:
    """Context manager around one optimizer step on a device; call `after_forward` within it.

    On a GPU the caching allocator reports the allocated bytes. A CPU's allocator has no such counter, so a
    `Recorder` counts every new tensor until it is freed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.saved, self.peak, self._start = device, 0, 0, 0
        self._recorder = None if device.type == "cuda" else Recorder(device.type)

    def __enter__(self) -> "MemoryTracker":
        if self._recorder is not None:
            self._recorder.__enter__()
        else:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        return self

    def after_forward(self, loss: torch.Tensor | None = None) -> None:
        """Record the bytes that the first forward pass keeps for the backward pass."""
        self.saved = self.saved or self.alive

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(exc_type, error, trace)
            self.peak = self._recorder.live.peak
        else:
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._start

    @property
    def alive(self) -> int:
        """The bytes that the step has allocated but not freed."""
        if self._recorder is None:
            return torch.cuda.memory_allocated(self.device) - self._start
        self._recorder.live.update_all()
        return self._recorder.live.alive

    def measured(self, trainer: Trainer) -> Memory:
        """The memory by class, after the step."""
        return measured(trainer, self.saved, self.peak)


def measured(trainer: Trainer, forward: int, peak: int) -> Memory:
    """The memory by class, after a step.

    Args:
        trainer: the state after the step.
        forward: bytes that the first forward pass allocated and kept.
        peak: the most bytes of the step alive at once.
    """
    device, host = _state_bytes(trainer)
    grads = [local_tensor(g) for p in trainer.optimizer.parameters() if (g := plain_gradient(p)) is not None]
    in_buckets = any(isinstance(module, DistributedDataParallel) for module in trainer.engine.modules)
    new = 0 if in_buckets else sum(g.nbytes for g in grads)  # DDP's buckets exist before the step
    saved = forward - _early_gradient(trainer)
    device["whole weights"] = min(saved, _full_weights(trainer))
    device["logits"] = min(saved - device["whole weights"], _logits(trainer))
    device["saved activations"] = saved - device["logits"] - device["whole weights"]
    # Gradients that the step allocates are a separate class.
    device["workspace"] = max(0, peak - saved - new)
    return Memory(device, host, count_parameters(trainer.config.spec.model))


def _state_bytes(trainer: Trainer) -> tuple[dict[str, int], dict[str, int]]:
    """(device, host): bytes of the state by class."""
    device, host = dict.fromkeys(STATE, 0), dict.fromkeys(("master", "gradients", "m", "v"), 0)
    seen: set[int] = set()

    def count(name: str, tensors: Sequence[torch.Tensor], on_host: bool = False) -> None:
        for t in tensors:
            if id(t) not in seen:
                seen.add(id(t))
                (host if on_host and name in host else device)[name] += local_tensor(t).nbytes

    for p in trainer.optimizer.parameters():
        kept = state_of(p).by_place()
        for place, state in (kept | trainer.optimizer.moments(p)).items():
            count(_CLASS_OF.get(place, place), list(state.tensors.values()), state.on_host)
        if "weight" not in kept:
            count("weights", [p])
        count("gradients", [] if (g := plain_gradient(p)) is None else [g])
        count("other", [trainer.optimizer.state[p]["step"]])
    count("other", [*trainer.model.buffers(), *recipe_tensors(trainer.model).values()])
    return device, {name: size for name, size in host.items() if size}


def _logits(trainer: Trainer) -> int:
    """Bytes of the head's output for a micro-batch; 0 if this rank has no head or the loss is chunked."""
    if trainer.model.head is None or trainer.model.chunks_loss:
        return 0
    config, count = trainer.config, trainer.model.share[1]
    tokens = config.training.micro_batch_size * config.data.sequence_length // count
    return tokens * config.spec.model.vocab_size * trainer.model.compute_dtype.itemsize


def _full_weights(trainer: Trainer) -> int:
    """Bytes of the weights that stay gathered after a forward pass: with ZeRO 3, all except the blocks'."""
    parallel_dims = trainer.engine.mesh.parallel_dims
    if not parallel_dims.is_sharded:
        return 0
    gathers = {m.weight: m.gathering for m in trainer.model.modules() if isinstance(m, Linear)}
    return sum(
        p.numel() * _sent_dtype(gathers.get(p)).itemsize
        for name, p in trainer.model.named_parameters()
        if parallel_dims.zero < 3 or not name.startswith("blocks.")
    )


def _sent_dtype(gather: WeightGather | None) -> torch.dtype:
    """The dtype in which FSDP gathers a weight."""
    if gather is None:
        return torch.float32
    if gather.at_rest is None:
        return torch.uint8 if gather.cast.is_scaled else torch_dtype(gather.cast.element) or torch.float32
    decoded = gather.at_rest.cast.is_scaled and not gather.cast.is_scaled
    return torch.float32 if decoded else next(iter(gather.at_rest.tensors.values())).dtype


def _early_gradient(trainer: Trainer) -> int:
    """Bytes of the head's gradient if the forward pass computes it (`kernels.head_loss`), else 0."""
    model = trainer.model
    if model.head is None or not model.chunks_loss or model.compute_dtype == torch.float16:
        return 0
    return model.head.weight.numel() * 4
