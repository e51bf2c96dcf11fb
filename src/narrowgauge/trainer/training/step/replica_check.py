"""Detects silent corruption: values changed by faulty memory or a faulty core.

Two checks:

- *Replicas.* Processes that hold the same tensors must hold the same bits. Each process sums the bit patterns
  of each tensor, as integers, modulo 2^64. The order of the elements does not matter, so the sums of a
  tensor's shards add up to its sum. One flipped bit k changes the sum by 2^k, so it is always detected
  (several may cancel).
- *Replay.* The same step computed twice from the same state must give the same loss and gradients, bit for
  bit. It needs no second process, detects faults during the computation, and costs a step. On a GPU it needs
  deterministic kernels.
"""

from collections.abc import Mapping, Sequence

import torch

from narrowgauge.quantization import gradient_of
from narrowgauge.system.errors import Failed
from narrowgauge.trainer.checkpoint import LocalTensors

_BLOCK = 1 << 22  # elements widened to 64 bits at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Corrupted(Failed):
    """Values that must be equal differ: exit code 1. Nothing is saved after that."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bit patterns of a tensor, or of its local shard: int64 with wrap-around, 0-dim.

    Patterns are signed integers of 2, 4 or 8 bytes, or unsigned bytes.
    """
    t = getattr(tensor, "to_local", lambda: tensor)().detach().contiguous()
    flat = t.view(-1).view(_INTEGERS[t.element_size()]) if t.numel() else t.new_zeros(0, dtype=torch.uint8)
    return torch.stack([block.sum(dtype=torch.int64) for block in flat.split(_BLOCK)]).sum()


def fingerprint(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, int]:
    """`{"GROUP NAME": sum of bits}` of tensors by group and name, such as `TrainState.tensors()`.

    It reads each element once, and synchronizes once.
    """
    sums = {f"{group} {name}": bits_of(t) for group, named in groups.items() for name, t in named.items()}
    if not sums:
        return {}
    device = max(sums.values(), key=lambda value: value.is_cuda).device  # others may be in the host's memory
    return dict(zip(sums, torch.stack([value.to(device) for value in sums.values()]).tolist(), strict=True))


def fingerprint_local(groups: LocalTensors) -> dict[str, int]:
    """The fingerprint of local slices; slices with equal names are equal slices of the same tensor."""
    return fingerprint(
        {
            group: {f"{name} from {s.offset}": s.tensor for name, slices in named.items() for s in slices}
            for group, named in groups.items()
        }
    )


def step_fingerprint(loss: torch.Tensor, names: Mapping[torch.Tensor, str]) -> dict[str, int]:
    """The fingerprint of a loss and of the gradients of named parameters, quantized or not."""
    gradients = {name: g for p, name in names.items() if (g := gradient_of(p)) is not None}
    return fingerprint({"the": {"loss": loss}, "the gradient of": gradients})


def require_same_replicas(fingerprints: Sequence[Mapping[str, int]], step: int) -> None:
    """Compare the replicas after a step.

    Raises:
        Corrupted: they differ; the message names the tensor, and the ranks in the minority of its holders, or
            all of these without a majority.
    """
    for name in dict.fromkeys(name for sums in fingerprints for name in sums):
        held = {rank: sums[name] for rank, sums in enumerate(fingerprints) if name in sums}
        values = list(held.values())
        most = max(values, key=values.count)
        if (count := values.count(most)) == len(values):
            continue
        ranks = [rank for rank, v in held.items() if 2 * count <= len(values) or v != most]
        who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        raise Corrupted(
            f"after step {step} the replicas differ in {name}, on {who}: memory or hardware fails there; "
            "nothing was saved since, so leave that machine out and give the same line again"
        )


def require_same_replay(first: Mapping[str, int], second: Mapping[str, int], step: int) -> None:
    """Compare both fingerprints of a step that was computed twice.

    Raises:
        Corrupted: they differ; the message names the tensor.
    """
    if name := next((name for name in {**first, **second} if first.get(name) != second.get(name)), None):
        raise Corrupted(
            f"step {step} was computed twice from the same state, and {name} differs: memory or hardware "
            "fails, or a kernel is not deterministic; see guard.replay_every, and try another machine"
        )
