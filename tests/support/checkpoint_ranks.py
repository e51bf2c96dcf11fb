"""What real processes, one or a world of them, do with checkpoints, and the tensors that they hold.

The tensors of a step are a function of its number, and which part of each a rank holds is a function of the
world's size: by rows as FSDP cuts them (the last rank may have nothing), by columns, in two stripes a rank,
the same on all, or on one rank alone.
"""

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from narrowgauge.system.files import write_whole
from narrowgauge.trainer.checkpoint import (
    AsyncSaver,
    LocalTensor,
    choose_step,
    load,
    plan_save,
    restore_distributed,
)
from narrowgauge.trainer.checkpoint import steps as published_steps

SHAPES = {
    "rows": (7, 6),
    "columns": (5, 9),
    "stripes": (12, 3),
    "replicated": (4, 4),
    "alone": (3,),
    "flat": (11,),
    "scalar": (),
    "empty": (0, 3),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float4_e2m1fn_x2)


def tensors_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """The whole tensors of a step: random bits that are finite in every dtype."""
    generator = torch.Generator().manual_seed(step)
    groups: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for number, dtype in enumerate(DTYPES):
        for name, shape in SHAPES.items():
            if dtype.itemsize > 1:
                x = torch.randn(shape, generator=generator).to(dtype)
            else:
                x = torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8).view(dtype)
            groups["model" if number % 2 else "optimizer"][f"{name}.{dtype}"] = x
    return groups


def parts_of(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> list[tuple[slice, ...]]:
    """Where the parts lie that a rank holds; [] = it does not know the tensor."""
    kind = name.split(".")[0]
    if kind in ("replicated", "scalar", "empty") or ranks == 1:
        return [tuple(slice(0, n) for n in shape)]
    if kind == "alone":
        return [(slice(0, shape[0]),)] if rank == ranks - 1 else []
    if kind in ("rows", "flat"):
        size = -(-shape[0] // ranks)
        first = min(rank * size, shape[0])
        return [(slice(first, min(first + size, shape[0])), *(slice(0, n) for n in shape[1:]))]
    if kind == "columns":
        edges = [0, *(shape[1] * (r + 1) ** 2 // ranks**2 for r in range(ranks))]
        return [(slice(0, shape[0]), slice(edges[rank], edges[rank + 1]))]
    size = shape[0] // (2 * ranks)
    firsts = (rank * size, (2 * ranks - 1 - rank) * size)
    ends = [first + size if first + size < 2 * ranks * size else shape[0] for first in firsts]
    return [(slice(a, b), slice(0, shape[1])) for a, b in zip(firsts, ends, strict=True)]


def local_tensors_of(groups: dict, rank: int, ranks: int) -> dict[str, dict[str, list[LocalTensor]]]:
    """What a rank holds of whole tensors, copied; a second name of one tensor is the same tensor."""
    local_tensors: dict[str, dict[str, list[LocalTensor]]] = {}
    for group, named in groups.items():
        local_tensors[group] = {}
        for name, x in named.items():
            parts = parts_of(name, x.shape, rank, ranks)
            raw = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
            held = [raw[p].clone().view(x.dtype) for p in parts]
            if parts:
                local_tensors[group][name] = [
                    LocalTensor(t, tuple(x.shape), tuple(s.start for s in p))
                    for t, p in zip(held, parts, strict=True)
                ]
    local_tensors["model"]["tied"] = local_tensors["model"]["rows.torch.bfloat16"]
    return local_tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def state_of(step: int) -> dict:
    return {"step": step, "list": [step]}


def assert_whole(path: Path, step: int) -> None:
    """Check that a checkpoint holds all of a step and nothing else, and that tied names are one tensor."""
    loaded, truth = load(path), tensors_of(step)
    assert (path.name, loaded.step, loaded.state) == (f"step-{step}", step, state_of(step))
    assert loaded.tensors["model"].pop("tied") is loaded.tensors["model"]["rows.torch.bfloat16"]
    for group, named in truth.items():
        assert loaded.tensors[group].keys() == named.keys()
        assert all(same_bits(loaded.tensors[group][name], x) for name, x in named.items())


def here() -> tuple[int, int, dist.ProcessGroup | None]:
    """(rank, size, group); a process alone has no group."""
    is_alone = not dist.is_initialized()
    return (0, 1, None) if is_alone else (dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def limit_files(full: Sequence[int]) -> None:
    """A disk that is full for (rank, bytes): no file of that rank may be larger."""
    if full and full[0] == here()[0]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (full[1], resource.RLIM_INFINITY))


def save(path: str, steps: list[int], poison: int = -1, hole=False, full: Sequence[int] = ()) -> list[str]:
    """Save some steps; one rank may have a poisoned tensor, or lack a part of another."""
    rank, ranks, group = here()
    limit_files(full)
    names = []
    for step in steps:
        local_tensors = local_tensors_of(tensors_of(step), rank, ranks)
        if poison == rank:
            local_tensors["optimizer"]["columns.torch.float32"][0].tensor.view(-1)[0] = torch.nan
        if hole and rank == 1:
            del local_tensors["model"]["columns.torch.bfloat16"]
        plan = plan_save(Path(path), step, local_tensors, state_of(step), 2, "run", group)
        names.append(plan.write().name)
    return names


def restore(path: str) -> dict:
    """Choose a step, restore every slice, and compare with what the step held."""
    rank, ranks, group = here()
    chosen, refused = choose_step(Path(path), "run", group)
    assert chosen is not None
    truth = local_tensors_of(tensors_of(int(chosen.name.removeprefix("step-"))), rank, ranks)
    wanted = local_tensors_of(tensors_of(10**6), rank, ranks)
    state_before = torch.get_rng_state()
    checkpoint = restore_distributed(chosen, wanted, group)
    wrong = [
        name
        for group, named in truth.items()
        for name, local_tensors in named.items()
        for a, b in zip(local_tensors, wanted[group][name], strict=True)
        if not same_bits(a.tensor, b.tensor)
    ]
    rng = torch.equal(state_before, torch.get_rng_state())
    return {"path": chosen.name, "refused": refused, "state": checkpoint.state, "wrong": wrong, "rng": rng}


def in_background(
    path: str, steps: list[int], delay: float = 0.0, kill: bool = False, full: Sequence[int] = ()
) -> dict:
    """Save steps in the background, spoiling every tensor and the state as soon as each call returns."""
    if delay:
        fsync = os.fsync

        def slow(descriptor: int) -> None:
            time.sleep(delay)
            fsync(descriptor)

        os.fsync = slow  # a slow disk
    rank, ranks, _ = here()
    said, published = [], []
    saver = AsyncSaver()
    limit_files(full)
    local_tensors = local_tensors_of(tensors_of(0), rank, ranks)
    state = state_of(0)

    def attempt(act: Callable[[], object], word: str) -> None:
        try:
            act()
            said.append(word)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    def plan_for(step, group):
        return plan_save(Path(path), step, local_tensors, state, 2, "run", group)

    for step in steps:
        fill(local_tensors, local_tensors_of(tensors_of(step), rank, ranks))
        state["step"] = state["list"][0] = step
        attempt(partial(saver.save, partial(plan_for, step)), "begun")
        published.append(published_steps(Path(path)))
        fill(local_tensors, local_tensors_of(tensors_of(10**6), rank, ranks))
        state["list"][0] = -1
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    attempt(saver.close, "closed")
    return {"said": said, "published": published}


def fill(local_tensors: dict, others: dict) -> None:
    """Copy the content of other tensors into these, in place."""
    for group, named in others.items():
        for name, parts in named.items():
            for new, old in zip(parts, local_tensors[group][name], strict=True):
                narrow = old.tensor.itemsize == 1
                a, b = (t.view(torch.uint8) if narrow else t for t in (old.tensor, new.tensor))
                a.copy_(b)


def write_text(path: str) -> None:
    write_whole(Path(path), "new")
