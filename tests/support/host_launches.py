"""The launches of a micro-batch, past Triton's binder and by it: prints how many, and those that differ."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import host

host.silence_driver()
host.pretend(is_native=True)

from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from narrowgauge.kernels.triton.launch import Launch

seen, bound = [], [0]


def plain(value):
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), tuple(value.stride())
    return repr(value)


def note(self):
    """In place of `CompiledKernel.run`: what the launcher would be called with."""

    def launcher(*args):
        grid, stream, function, packed, _, enter, leave, *rest = args[:3], *args[3:]
        seen.append((self.hash, grid, stream, function, packed, enter, leave, [plain(a) for a in rest]))

    return launcher


def counted(self, *args, **options):
    bound[0] += 1
    return run(self, *args, **options)


run = JITFunction.run
torch.set_num_threads(1)
micro_batches = [host.pass_of("qwen2.5-1.5b", recipe, 2, True) for recipe in ("fp8", "fp8-delayed", "bf16")]
for micro_batch in micro_batches * 3:
    micro_batch()
CompiledKernel.run = property(note)
JITFunction.run = counted
again = Launch._launched_again
rounds = []
for way in (again, lambda self, args: False):
    Launch._launched_again = way
    seen.clear()
    bound[0] = 0
    for micro_batch in micro_batches:
        micro_batch()
    rounds.append((list(seen), bound[0]))
(past, by_triton), (all_by_triton, whole) = rounds
unlike = [str(a)[:300] for a, b in zip(past, all_by_triton, strict=True) if a != b]
kernels = {launch[0] for launch in past}
assert whole == len(all_by_triton)
print(
    json.dumps(
        {"launches": len(past), "kernels": len(kernels), "past": len(past) - by_triton, "unlike": unlike}
    )
)
