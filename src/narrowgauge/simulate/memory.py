"""The memory of a training step by class of tensor, measured from a step or estimated for one.

    weights, master, gradients, m, v     counted from the tensors themselves
    other                                amax histories of recipes, step counts, buffers
    saved activations                    tensors that a forward pass creates and keeps,
    logits                               except the head's output (none with a chunked loss, whose gradient of
                                         the head is among the gradients from the forward pass on)
    whole weights                        and except sharded weights that FSDP has gathered
    workspace                            the rest of the peak of a complete optimizer step

`memory_tracker` measures a real step, `memory_estimate` runs it on meta tensors; both end in `measured`, so a
plan and a run always have the same classes. Each of several processes is measured separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.models import count_parameters
from narrowgauge.nn import recipe_tensors
from narrowgauge.quantization import local_tensor, plain_gradient, state_of
from narrowgauge.simulate.fake_fsdp import full_weights
from narrowgauge.simulate.memory_tracker import MemoryTracker
from narrowgauge.training.step.trainer import Trainer
from narrowgauge.units import human_bytes

STATE = ("weights", "master", "gradients", "m", "v", "other")
_CLASS_OF = {"weight": "weights", "grad": "gradients"}  # other places of state have their class's name
CLASSES = (*STATE, "saved activations", "logits", "whole weights", "workspace")


@dataclass(frozen=True)
class Memory:
    """Bytes by class: on the device, and of the state in the host's memory."""

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


def measured(trainer: Trainer, tracker: MemoryTracker) -> Memory:
    """The memory by class, after a step under `tracker`."""
    device, host = _state_bytes(trainer)
    grads = [local_tensor(g) for p in trainer.optimizer.parameters() if (g := plain_gradient(p)) is not None]
    in_buckets = any(isinstance(module, DistributedDataParallel) for module in trainer.engine.modules)
    new = 0 if in_buckets else sum(g.nbytes for g in grads)  # DDP's buckets exist before the step
    saved = tracker.saved - _early_gradient(trainer)
    device["whole weights"] = min(saved, full_weights(trainer.model, trainer.engine.mesh))
    device["logits"] = min(saved - device["whole weights"], _logits(trainer))
    device["saved activations"] = saved - device["logits"] - device["whole weights"]
    # Gradients that the step allocates are a separate class.
    device["workspace"] = max(0, tracker.peak - saved - new)
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
    """Bytes of the head's output for a micro-batch; 0 without a head on this rank or with a chunked loss."""
    if trainer.model.head is None or trainer.model.chunks_loss:
        return 0
    t, data, count = trainer.config.training, trainer.config.data, trainer.model.share[1]
    tokens = t.micro_batch_size * data.sequence_length // count
    return tokens * trainer.config.spec.model.vocab_size * trainer.model.compute_dtype.itemsize


def _early_gradient(trainer: Trainer) -> int:
    """Bytes of the head's gradient if the forward pass computes it (`kernels.head_loss`), else 0."""
    model = trainer.model
    if model.head is None or not model.chunks_loss or model.compute_dtype == torch.float16:
        return 0
    return model.head.weight.numel() * 4
