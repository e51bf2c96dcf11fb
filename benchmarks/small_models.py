"""Training steps of small models on a CPU: before and after code in C, and against plain torch.

    OMP_NUM_THREADS=1 python benchmarks/small_models.py [--model ladder-1m] [--batch 16] [--length 128]
        [--recipes bf16,fp8,mxfp8,mxfp4,nvfp4] [--compiled bf16,mxfp4] [--rounds 9] [--out FILE]

Every contestant takes an optimizer step each round, in one process and in turn; every other round runs in
reverse. A ratio belongs to one round: medians with quartiles are printed. Time is processor time of all
threads, which other work on the machine moves least. `torch` is narrowgauge with torch's attention, heads and
norms, `in-order` has `kernels.attention.in_order`, `C` also the heads and norms of `layers.c`, which compiled
steps leave to torch's compiler. Plain torch is the peers of `narrowgauge bench`:
the same model with `torch.nn.Linear` and fused AdamW, in fp32 or under bf16 autocast. All have memory kept,
as `train` does, and ours multiplies bf16 in the precision that `train` chooses.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from narrowgauge.bench.peers import peer_step
from narrowgauge.bench.timing import Spread, take_turns
from narrowgauge.bench.worker import own_step, random_batches
from narrowgauge.kernels import choose_attention, heads, norm
from narrowgauge.quantization.passes.c_call import takes
from narrowgauge.runs.monitor.arithmetic import Arithmetic
from narrowgauge.runs.monitor.hardware import memory_kept
from narrowgauge.training import make_config

CPU = torch.device("cpu")
WAYS = ("torch", "in-order", "C")


def choose(way: str) -> None:
    """From now on compute in one of the ways."""
    choose_attention("torch" if way == "torch" else "in-order")
    heads.takes = norm.takes = takes if way == "C" else lambda *_: False


def timed(step: Callable[[], object], way: str) -> Callable[[], float]:
    """A step that returns its seconds; the first two calls have been made."""

    def run() -> float:
        choose(way)
        start = time.process_time()
        step()
        return time.process_time() - start

    run(), run()
    return run


def contestants(options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    steps = {}

    def config(recipe: str, compiled: bool):
        training = {"batch_size": options.batch, "micro_batch_size": options.batch, "compile": compiled}
        values = {"model": {"name": options.model}, "recipe": {"name": recipe}}
        return make_config(
            values | {"training": training | {"device": "cpu"}, "data": {"sequence_length": options.length}}
        )

    for how, names in (("eager", options.recipes), ("compiled", options.compiled)):
        for recipe in filter(None, names.split(",")):
            for way in options.ways.split(","):
                if (how, way) == ("compiled", "C"):
                    continue
                made = config(recipe, how == "compiled")
                choose(way)
                steps[f"{recipe} {how}, {way}"] = timed(own_step(made, CPU, random_batches(made, CPU)), way)
                print(f"{recipe} {how}, {way}: ready", flush=True)
    plain = config("bf16", False)
    for peer in filter(None, options.peers.split(",")):
        steps[peer] = timed(peer_step(peer, plain, CPU, random_batches(plain, CPU)), "torch")
        print(f"{peer}: ready", flush=True)
    return steps


def report(times: dict[str, list[float]], tokens: int, peers: list[str]) -> dict[str, dict[str, object]]:
    """One row each: tokens per second of processor time, and the speed over others, round by round."""
    rows = {}
    for name, own in times.items():
        before = name.rpartition(", ")[0] + ", torch"
        others = ({"before": before} if before in times else {}) | {peer: peer for peer in peers}
        over = {
            label: Spread.of([b / a for a, b in zip(own, times[other], strict=True)])
            for label, other in others.items()
            if other != name
        }
        rows[name] = {"tokens_per_s": tokens / Spread.of(own).median} | {k: str(v) for k, v in over.items()}
        listed = "   ".join(f"{label} {spread}" for label, spread in over.items())
        print(f"{name:28s} {rows[name]['tokens_per_s']:8.0f}   over {listed}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ladder-1m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--recipes", default="bf16,fp8,mxfp8,mxfp4,nvfp4")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--compiled", default="bf16,mxfp4")
    parser.add_argument("--peers", default="torch fp32,torch bf16,torch fp32 compiled,torch bf16 compiled")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    chosen = Arithmetic.of((), 32, options.length)
    chosen.choose()
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "products": chosen.products}
    print(facts)
    with memory_kept(CPU):
        steps = contestants(options)
        times = take_turns(steps, options.rounds)
    rows = report(times, options.batch * options.length, [p for p in options.peers.split(",") if p])
    if options.out:
        options.out.write_text(json.dumps(facts | {"rows": rows, "seconds": times}, indent=2) + "\n")


if __name__ == "__main__":
    main()
