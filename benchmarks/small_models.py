"""Training steps of small models on a CPU: against plain torch, and against an older checkout.

    OMP_NUM_THREADS=1 python benchmarks/small_models.py [--before TREE] [--model ladder-1m] [--batch 16]
        [--length 128] [--recipes bf16,fp8,mxfp8,mxfp4,nvfp4] [--compiled bf16,mxfp8] [--rounds 9]
        [--out FILE]

Every contestant takes an optimizer step each round, in turn; every other round runs in reverse. A ratio
belongs to one round: medians with quartiles are printed, and the load of the machine. With one thread, time
is processor time, which other work on the machine moves least; with more it is the clock's, because threads
that wait for each other use their processors. Plain torch is the peers of `narrowgauge bench`: the same model
with `torch.nn.Linear` and fused AdamW, in fp32 or under bf16 autocast. All have memory kept, as `train` does,
and ours multiplies bf16 in the precision, and computes attention in the way, that `train` chooses.

`--before TREE` is a checkout of this repository (`git worktree add TREE COMMIT`) whose recipes also compete,
in a process of their own, with torch's attention, as `train` computed it before `attention_in_order.py`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).parents[1]
PEERS = "torch fp32,torch bf16,torch fp32 compiled,torch bf16 compiled"


def contestants(options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The steps of one tree by name: "bf16", "bf16 compiled", "torch fp32"."""
    import torch

    from narrowgauge.trainer.bench.peers import peer_step
    from narrowgauge.trainer.bench.worker import own_step, random_batches
    from narrowgauge.trainer.training import make_config

    cpu, steps = torch.device("cpu"), {}
    sizes = {"batch_size": options.batch, "micro_batch_size": options.batch, "device": "cpu"}

    def config(recipe: str, compiled: bool = False):
        values = {"model": {"name": options.model}, "recipe": {"name": recipe}}
        values |= {"training": sizes | {"compile": compiled}, "data": {"sequence_length": options.length}}
        return make_config(values)

    for names, suffix in ((options.recipes, ""), (options.compiled, " compiled")):
        for recipe in filter(None, names.split(",")):
            made = config(recipe, bool(suffix))
            step = own_step(made, cpu, random_batches(made, cpu))
            steps[recipe + suffix] = partial(_with_attention, options.attention or _measured(made), step)
    plain = config("bf16")
    for peer in filter(None, options.peers.split(",")):
        steps[peer] = peer_step(peer, plain, cpu, random_batches(plain, cpu))
    return steps


def _measured(config) -> str:
    """The attention that `train` chooses."""
    from narrowgauge.trainer.runs.monitor.machine import measured_attention

    spec = config.spec
    return measured_attention(spec.model.head_dim, config.data.sequence_length, spec.recipe.compute)


def _with_attention(way: str, step: Callable[[], object]) -> None:
    from narrowgauge.kernels.dispatch import choose_attention

    choose_attention(way)
    step()


def work(options: argparse.Namespace) -> None:
    """Take the steps that standard input names; each answer is a line of JSON."""
    import torch

    from narrowgauge.kernels.dispatch import choose_products
    from narrowgauge.trainer.runs.monitor.machine import memory_kept

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    choose_products(options.products)
    torch._dynamo.config.recompile_limit = 256  # of a function; the ninth contestant would run eagerly
    with memory_kept(torch.device("cpu")):
        steps = contestants(options)
        for step in steps.values():
            step(), step()
        print(json.dumps(list(steps)), flush=True)
        for line in sys.stdin:
            start = clock()
            steps[line.strip()]()
            print(json.dumps(clock() - start), flush=True)


class Tree:
    """A process that computes with the source of a checkout, and the names of its contestants."""

    def __init__(self, tree: Path, options: argparse.Namespace, **changed: str) -> None:
        given = vars(options) | changed | {"before": None, "out": None, "worker": "yes"}
        own = tree / "benchmarks" / Path(__file__).name  # it knows the names of its checkout
        words = [f"--{key}={value}" for key, value in given.items() if value is not None]
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        self.process = subprocess.Popen(
            [sys.executable, own, *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names: list[str] = self.answer()

    def answer(self):
        """What the process says next."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def step(self, name: str) -> float:
        """The seconds of a contestant's step."""
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        """Let the process end, and wait for it."""
        self.process.communicate()


def report(times: dict[str, list[float]], tokens: int, peers: list[str]) -> dict[str, dict[str, object]]:
    """One row each: tokens per second, and the speed over others, round by round."""
    from narrowgauge.trainer.bench.bench import Spread

    rows = {}
    for name, own in times.items():
        others = {"before": f"{name}, before"} | {peer: peer for peer in peers}
        over = {
            label: str(Spread.of([b / a for a, b in zip(own, times[other], strict=True)]))
            for label, other in others.items()
            if other != name and other in times
        }
        rows[name] = {"tokens_per_s": tokens / Spread.of(own).median} | over
        listed = "   ".join(f"{label} {spread}" for label, spread in over.items())
        print(f"{name:24s} {rows[name]['tokens_per_s']:8.0f}   over {listed}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ladder-1m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--recipes", default="bf16,fp8,mxfp8,mxfp4,nvfp4")
    parser.add_argument("--compiled", default="bf16,mxfp8", help="recipes that are also compiled")
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path, help="an older checkout")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--attention", default="", help="of all recipes; what train chooses if left out")
    for name in ("worker", "products"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    import torch

    from narrowgauge.trainer.bench.bench import take_turns
    from narrowgauge.trainer.runs.monitor.machine import measured_products

    options.products = measured_products()
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "products": options.products}
    print(facts, flush=True)
    trees = {"": Tree(HERE, options)}
    if options.before:
        trees[", before"] = Tree(options.before, options, attention="torch", compiled="", peers="")
    steps = {name + suffix: partial(tree.step, name) for suffix, tree in trees.items() for name in tree.names}
    loads = [os.getloadavg()[0]]
    times = take_turns(steps, options.rounds)
    loads.append(os.getloadavg()[0])
    for tree in trees.values():
        tree.end()
    print(f"load of the machine: {loads[0]:.1f} at the beginning, {loads[1]:.1f} at the end")
    rows = report(times, options.batch * options.length, [p for p in options.peers.split(",") if p])
    if options.out:
        found = facts | {"loads": loads, "rows": rows, "seconds": times}
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
