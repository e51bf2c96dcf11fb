"""The launches of a micro-batch, past Triton's binder and by it: prints how many, and those that differ."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import host

RECIPES = ("fp8", "fp8-delayed", "bf16")


def plain(value):
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), tuple(value.stride())
    return repr(value)


def main():
    torch.set_num_threads(1)
    host.silence_driver()
    host.pretend(is_native=True)
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    from narrowgauge.kernels.triton.launch import Launch

    seen, bound = [], []
    run, again = JITFunction.run, Launch._launched_again

    def note(self):
        """In place of `CompiledKernel.run`: notes what its launcher would be called with."""

        def launcher(*args):
            *where, function, packed, _, enter, leave = args[:9]
            rest = [plain(a) for a in args[9:]]
            seen.append((self.hash, where, function, packed, enter, leave, rest))

        return launcher

    def counted(self, *args, **options):
        bound.append(1)
        return run(self, *args, **options)

    micro_batches = [host.pass_of("qwen2.5-1.5b", recipe, 2, True) for recipe in RECIPES]
    for micro_batch in micro_batches * 3:
        micro_batch()
    CompiledKernel.run, JITFunction.run = property(note), counted
    rounds = []
    for way in (again, lambda self, args: False):
        Launch._launched_again = way
        seen.clear()
        bound.clear()
        for micro_batch in micro_batches:
            micro_batch()
        rounds.append((list(seen), len(bound)))
    (past, by_triton), (all_by_triton, all_bound) = rounds
    assert all_bound == len(all_by_triton)
    found = {
        "launches": len(past),
        "kernels": len({launch[0] for launch in past}),
        "past": len(past) - by_triton,
        "unlike": [str(a)[:300] for a, b in zip(past, all_by_triton, strict=True) if a != b],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
