"""Silent corruption: numbers that changed though nothing changed them (a bad cell, a bad core).

Two checks, of what can be compared:

- *Replicas.* Processes that hold the same tensors must hold the same bits. Each sums the bit patterns of
  each tensor, as integers, modulo 2^64. The order of the elements does not matter, so shards of a tensor add
  up to the whole; and one flipped bit k changes the sum by 2^k, so it is always seen (several may cancel).
- *Replay.* The same step computed twice from the same state must give the same loss and the same gradients,
  bit for bit. It needs no second process, sees what goes wrong on the way, and costs a step. On a GPU it
  needs kernels that are deterministic.
"""

from collections.abc import Mapping, Sequence

import torch

from narrowgauge.quantization import gradient_of

_BLOCK = 1 << 22  # elements widened to 64 bits at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Corrupted(Exception):
    """Numbers that must be equal are not: exit code 1. Nothing is saved after that."""


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bit patterns as signed integers (bytes: unsigned), int64 with wrap-around, 0-dim.

    Of a sharded tensor, that of the shard that is here.
    """
    t = getattr(tensor, "to_local", lambda: tensor)().detach().contiguous()
    flat = t.view(-1).view(_INTEGERS[t.element_size()]) if t.numel() else t.new_zeros(0, dtype=torch.uint8)
    parts = [part.sum(dtype=torch.int64) for part in flat.split(_BLOCK)]
    return torch.stack(parts).sum()


def fingerprint(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, int]:
    """`{"GROUP NAME": sum of its bits}` of tensors by group and name, such as `Session.tensors()`.

    One pass over the numbers, and one wait for each device.
    """
    sums = {f"{group} {name}": bits_of(t) for group, named in groups.items() for name, t in named.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, value in sums.items():
        by_device.setdefault(value.device, []).append(name)
    found: dict[str, int] = {}
    for names in by_device.values():
        found |= dict(zip(names, torch.stack([sums[n] for n in names]).tolist(), strict=True))
    return {name: found[name] for name in sums}


def step_fingerprint(loss: torch.Tensor, names: Mapping[torch.Tensor, str]) -> dict[str, int]:
    """The bits of a loss and of the gradients of named parameters, wherever those are kept."""
    gradients = {name: g for p, name in names.items() if (g := gradient_of(p)) is not None}
    return fingerprint({"the": {"loss": loss}, "the gradient of": gradients})


def first_difference(mine: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    """The first tensor whose fingerprint is another one, or that only one of the two has."""
    every = dict.fromkeys([*mine, *theirs])
    return next((name for name in every if mine.get(name) != theirs.get(name)), None)


def differing_ranks(prints: Sequence[Mapping[str, int]]) -> tuple[str, list[int]] | None:
    """The first tensor that replicas do not agree on, and the ranks that hold it unlike most.

    None where all agree. Where no value is held by more than half of them, it cannot be told who is wrong,
    and all are named.
    """
    every = dict.fromkeys(name for one in prints for name in one)
    for name in every:
        values = [one.get(name) for one in prints]
        most = max(values, key=values.count)
        if values.count(most) < len(values):
            known = 2 * values.count(most) > len(values)
            return name, [rank for rank, v in enumerate(values) if not known or v != most]
    return None


def common(prints: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Of what each rank holds that which others hold, too; a rank without it gets what most of them have."""
    values: dict[str, list[int]] = {}
    for one in prints:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    most = {name: max(found, key=found.count) for name, found in values.items() if len(found) > 1}
    return [{name: one.get(name, value) for name, value in most.items()} for one in prints]


def require_same_replicas(prints: Sequence[Mapping[str, int]], step: int) -> None:
    """Raise `Corrupted` where replicas differ after a step, with the tensor and the ranks."""
    if (found := differing_ranks(prints)) is not None:
        name, ranks = found
        who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        raise Corrupted(
            f"after step {step} the replicas differ in {name}, on {who}: memory or hardware fails there; "
            "nothing was saved since, so leave that machine out and give the same line again"
        )


def require_same_replay(first: Mapping[str, int], second: Mapping[str, int], step: int) -> None:
    """Raise `Corrupted` where a step that was computed twice gave two results."""
    if (name := first_difference(first, second)) is not None:
        raise Corrupted(
            f"step {step} was computed twice from the same state, and {name} differs: memory or hardware "
            "fails, or a kernel is not deterministic; see guard.replay_every, and try another machine"
        )
