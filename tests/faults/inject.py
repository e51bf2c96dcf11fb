"""`python inject.py ...` is `narrowgauge ...` with a fault in it: the whole command, and one thing that goes
wrong as it may go wrong in life.

FAULTS in the environment is a JSON list of objects: {"kind": a function below, and its arguments}. With
"rank", only that rank has the fault; with "steps", only these steps.
"""

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from narrowgauge.nn import Linear
from narrowgauge.trainer.training.step.trainer import Trainer

RANK = int(os.environ.get("RANK", "0"))
Undo = Callable[[], None]


def in_steps(steps: Iterable[int], spoil: Callable[[Trainer], Undo]) -> None:
    """Do something to the session before each of these steps, and undo it after."""
    at, take = set(steps), Trainer.train_step

    def train_step(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if self.step + 1 not in at or next(self.model.parameters()).is_meta:  # the memory estimate
            return take(self, *args, **kwargs)
        undo = spoil(self)
        try:
            return take(self, *args, **kwargs)
        finally:
            undo()

    Trainer.train_step = train_step  # type: ignore[method-assign]


def gradient(steps: Iterable[int], factor: float, layer: str = "blocks.1.down") -> None:
    """The gradient that flows back into a layer is multiplied: by nan, inf, or a large number."""

    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda g: g * factor)

    in_steps(steps, lambda trainer: trainer.model.get_submodule(layer).register_forward_hook(hook).remove)


def output(steps: Iterable[int], factor: float, layer: str = "norm") -> None:
    """What a layer puts out is multiplied: a batch on which the model is surprisingly wrong."""

    def hook(module: torch.nn.Module, inputs: Any, y: torch.Tensor) -> torch.Tensor:
        return y * factor if torch.is_grad_enabled() else y

    in_steps(steps, lambda trainer: trainer.model.get_submodule(layer).register_forward_hook(hook).remove)


def outgrow(first: int, factor: float = 1024.0) -> None:
    """From step `first` on inputs of layers in blocks are much larger, and outputs as much smaller.

    In high precision nothing changes, as the factor is a power of two. Scales that are older than the inputs
    do not fit them.
    """
    accumulate = Trainer._accumulate

    def spoiled(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if self.step + 1 < first:
            return accumulate(self, *args, **kwargs)
        layers = [m for m in self.model.blocks.modules() if isinstance(m, Linear)]
        handles = [m.register_forward_pre_hook(lambda m, x: (x[0] * factor, *x[1:])) for m in layers]
        handles += [m.register_forward_hook(lambda m, x, y: y / factor) for m in layers]
        try:
            return accumulate(self, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    Trainer._accumulate = spoiled  # type: ignore[method-assign]


def flip(steps: Iterable[int], layer: str = "blocks.0.down") -> None:
    """One bit of a weight is another one: silent corruption."""

    def spoil(trainer: Trainer) -> Undo:
        weight = trainer.model.get_submodule(layer).weight
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        bits = local.detach().view(torch.uint8).view(-1)
        bits[bits.numel() // 2 + local.element_size() - 1] ^= 0x20  # of an exponent
        return lambda: None

    in_steps(steps, spoil)


def stop(steps: Iterable[int], how: str, micro_batch: int = 0) -> None:
    """Inside these steps, before micro-batch number `micro_batch`, the process raises or dies."""

    def spoil(trainer: Trainer) -> Undo:
        seen: list[None] = []

        def hook(module: torch.nn.Module, inputs: Any) -> None:
            seen.append(None)
            if len(seen) != micro_batch + 1:
                return
            if how == "raise":
                raise RuntimeError("the fault that was asked for")
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)

        return trainer.model.embedding.register_forward_pre_hook(hook).remove

    in_steps(steps, spoil)


def signals(steps: Iterable[int], name: str) -> None:
    """The process gets a signal inside these steps."""

    def spoil(trainer: Trainer) -> Undo:
        os.kill(os.getpid(), signal.Signals[name])
        return lambda: None

    in_steps(steps, spoil)


def clock(after_s: float, back_s: float) -> None:
    """Some time after the start, the wall clock is set back."""
    now, start = time.time, time.monotonic()
    time.time = lambda: now() - (back_s if time.monotonic() - start > after_s else 0)


KINDS = (gradient, output, outgrow, flip, stop, signals, clock)


def main() -> None:
    kinds = {kind.__name__: kind for kind in KINDS}
    for fault in json.loads(os.environ["FAULTS"]):
        if fault.pop("rank", RANK) == RANK:
            kinds[fault.pop("kind")](**fault)
    sys.argv[0] = "narrowgauge"
    runpy.run_module("narrowgauge", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
