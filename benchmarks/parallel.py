"""What two processes cost and gain, over gloo on this machine: each part on its own, or all.

    python benchmarks/parallel.py overhead|save|speed|wire|all [--rounds 12] [--dim 512] [--layers 4] ...

overhead   the engine under FSDP2 against plain FSDP2: the same model of torch.nn.Linear, torch's AdamW, a
           plain loop. Both are made in the same processes and take turns, step by step.
save       intervals of some steps: without a save, with one in the background, with one at once.
speed      one process against two, each grid of two in its turn; tokens a second, and the share of a step in
           which some collective is under way (waiting for the other rank, and beside products, included).
wire       bytes that a rank sends in an optimizer step, as `distributed.traffic` counts them, an element of
           the weights: divided by the elements and by (N - 1) / N, the share that a ring sends.

Every rank has one thread. A ratio is that of a round, so that whatever else the machine does meets both; the
median of the rounds is printed with the quartles. `cpu` are ratios of processor time, which a loaded machine
disturbs less, but which does not see waiting.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

from narrowgauge.distributed import Mesh, ParallelDims
from narrowgauge.distributed.byte_counter import CommCounter
from narrowgauge.optim import parameter_groups
from narrowgauge.trainer.checkpoint import AsyncSaver
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.distributed import Coordinator, World
from narrowgauge.trainer.distributed.parallel.parallelize import Objective
from narrowgauge.trainer.models import Transformer, initialize
from narrowgauge.trainer.runs.monitor.profiler import covered
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer

CPU = torch.device("cpu")
LAYOUTS = {
    "alone": ParallelDims(),
    "DDP": ParallelDims(replicate=2),
    "FSDP2, zero 1": ParallelDims(shard=2, zero=1),
    "FSDP2, zero 2": ParallelDims(shard=2, zero=2),
    "FSDP2, zero 3": ParallelDims(shard=2),
    "tensor 2": ParallelDims(tensor=2),
    "context 2": ParallelDims(context=2),
    "pipeline 2": ParallelDims(pipeline=2),
}
RECIPES = ("fp32", "bf16", "fp8", "msamp-o2")


class Bench:
    """What all parts share: the options, the rank, and models of the same shape."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank = options, rank
        self.coordinator = Coordinator(World(rank, 2, rank, 2, 0, 1, "none", "localhost", 0), CPU)
        self.coordinator.control = dist.new_group()

    def config(self, recipe: str) -> Any:
        """A run of a recipe."""
        o = self.options
        model = {"name": "gpt2-debug", "dim": o.dim, "heads": o.dim // 64, "kv_heads": o.dim // 64}
        model |= {"ffn_dim": 4 * o.dim, "layers": o.layers, "vocab_size": o.vocab}
        training = {"batch_size": 2 * o.batch, "micro_batch_size": o.batch, "device": "cpu"}
        return make_config(
            {
                "model": model,
                "data": {"sequence_length": o.length},
                "training": training,
                "recipe": {"name": recipe},
                "guard": {"spike": "off"},
            }
        )

    def trainer(self, recipe: str, parallel_dims: ParallelDims) -> Trainer:
        """Its state before the first step."""
        return Trainer.begin(self.config(recipe), CPU, Mesh(parallel_dims, CPU))

    def batches(self, parallel_dims: ParallelDims) -> list[Batch]:
        """This process's micro-batches of a step, always the same."""
        o, number = self.options, self.rank if parallel_dims.data > 1 else 0
        g = torch.Generator().manual_seed(number)
        count = 2 // parallel_dims.data
        ids = [torch.randint(o.vocab, (o.batch, o.length + 1), generator=g) for _ in range(count)]
        return [Batch(x[:, :-1], x[:, 1:], x[:, 1:].numel()) for x in ids]

    def engine_step(self, recipe: str, parallel_dims: ParallelDims) -> tuple[Trainer, Callable[[], Any]]:
        """A run, and what takes one step of it."""
        trainer, batches = self.trainer(recipe, parallel_dims), self.batches(parallel_dims)

        def step() -> None:
            trainer.train_step(iter(batches))
            if parallel_dims.size > 1:
                self.coordinator.all_reduce_max(asked=0, late=0)

        return trainer, step

    def measure(self, step: Callable[[], Any], times: int = 1) -> tuple[float, float]:
        """Seconds of the clock, on the slower rank, and of the processors, on both, of some steps."""
        dist.barrier()
        clock, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            step()
        taken = torch.tensor([time.perf_counter() - clock])
        worked = torch.tensor([time.process_time() - cpu])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        dist.all_reduce(worked)
        return taken.item(), worked.item()

    def say(self, text: str) -> None:
        """Once, not on every rank."""
        if self.rank == 0:
            print(text, flush=True)


def spread(values: list[float], digits: int = 3) -> str:
    """The median, and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


class Head(torch.nn.Linear):
    """A head whose weight, the embedding's, stays fp32, and which multiplies in what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As ever."""
        return torch.nn.functional.linear(x, self.weight.to(x.dtype))


def plain_step(bench: Bench, recipe: str) -> Callable[[], Any]:
    """FSDP2 as one writes it without this project; the embedding and the residual stream are fp32, too."""
    config = bench.config(recipe)
    narrow = torch.bfloat16 if recipe == "bf16" else torch.float32
    model = Transformer(config.spec.model, narrow)
    model.head = Head(bench.options.dim, bench.options.vocab, bias=False)
    initialize(model, 0)
    mesh = init_device_mesh("cpu", (2,))
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=replace(whole, param_dtype=narrow))
    objective = fully_shard(Objective(model), mesh=mesh, mp_policy=whole)
    o = config.optimizer
    groups = parameter_groups(model, o.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)
    (batch,) = bench.batches(LAYOUTS["FSDP2, zero 3"])

    def step() -> None:
        loss = objective(batch.x_BT, batch.y_BT)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), o.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        loss.item(), norm.full_tensor().item()

    return step


def overhead(bench: Bench) -> Any:
    """Ratios of the engine's step to the plain one."""
    found = {}
    for recipe in ("fp32", "bf16"):
        steps = {"plain": plain_step(bench, recipe)}
        steps["ours"] = bench.engine_step(recipe, LAYOUTS["FSDP2, zero 3"])[1]
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for turn in range(-2, bench.options.rounds):
            for name in sorted(steps, reverse=turn % 2 == 0):
                one = bench.measure(steps[name])
                if turn >= 0:
                    taken[name].append(one)
        pairs = list(zip(taken["ours"], taken["plain"], strict=True))
        clock, cpu = ([a[i] / b[i] for a, b in pairs] for i in (0, 1))
        least = min(t for t, _ in taken["plain"])
        found[recipe] = {"clock": clock, "cpu": cpu, "plain_s": least}
        bench.say(f"{recipe:5} {spread(clock)}   cpu {spread(cpu)}   plain step {least * 1e3:.0f} ms at best")
    return found


def save(bench: Bench) -> Any:
    """What an interval of steps takes with a save at its beginning, over one without."""
    trainer, step = bench.engine_step("bf16", LAYOUTS["FSDP2, zero 3"])
    ratios: dict[str, list[tuple[float, ...]]] = {"background": [], "at once": []}
    place = Path(bench.options.directory) / "checkpoints"
    every = bench.options.interval
    with AsyncSaver() as saver:

        def background() -> None:
            saver.save(place, trainer.step, trainer.local_tensors(), trainer.state(), 2, "benchmark")

        def at_once() -> None:
            trainer.plan_save(place, "benchmark", bench.coordinator.control).write()

        for turn in range(-1, bench.options.rounds):
            without, alone = bench.measure(step, every)
            for name, begin in (("background", background), ("at once", at_once)):
                call, cpu_of_call = bench.measure(begin)
                rest, cpu = bench.measure(step, every)
                left, cpu_left = bench.measure(saver.wait)
                if turn >= 0:
                    cpu_of_all = (cpu_of_call + cpu + cpu_left) / alone
                    clock = (call + rest) / without
                    ratios[name].append((clock, cpu_of_all, call / without * every, left / without * every))
    for name, every_round in ratios.items():
        clock, cpus, calls, lefts = ([one[i] for one in every_round] for i in range(4))
        bench.say(
            f"{name:10} {spread(clock)}   cpu {spread(cpus)}   in steps: the call {spread(calls)}, "
            f"left after the interval {spread(lefts)}"
        )
    size = sum(file.stat().st_size for file in place.glob("step-*/*")) / 2
    step_ms = without / every * 1e3
    bench.say(f"{size / 2**20:.0f} MiB a checkpoint, {every} steps of {step_ms:.0f} ms between saves")
    return {"ratios": ratios, "bytes": size, "step_ms": step_ms}


def speed(bench: Bench) -> Any:
    """Tokens a second of each grid, and of one process, for the same batch."""
    found = {}
    o = bench.options
    for recipe in o.recipes.split(","):
        steps = {name: bench.engine_step(recipe, parallel_dims)[1] for name, parallel_dims in LAYOUTS.items()}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(-2, o.rounds):
            for name, step in steps.items():
                idle = name == "alone" and bench.rank == 1
                seconds, _ = bench.measure((lambda: None) if idle else step)
                if turn >= 0:
                    taken[name].append(seconds)
        bench.say(f"\n{recipe:15} tokens/s   speed-up               collectives")
        for name, times in taken.items():
            ratios = [a / b for a, b in zip(taken["alone"], times, strict=True)]
            share = 0.0 if name == "alone" else share_of_collectives(steps[name])
            tokens = 2 * o.batch * o.length / statistics.median(times)
            found[f"{recipe}, {name}"] = {"tokens_per_s": tokens, "speed_up": ratios, "collectives": share}
            bench.say(f"{name:15} {tokens:8.0f}   {spread(ratios, 2)}   {share:8.0%}")
        del steps
    return found


def share_of_collectives(step: Callable[[], Any]) -> float:
    """The share of a step in which some collective is under way on this rank."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        start = time.perf_counter()
        step()
        taken = time.perf_counter() - start
    spans = [(e.time_range.start, e.time_range.end) for e in seen.events() if e.name.startswith("gloo:")]
    return covered(spans) / 1e6 / taken


def wire(bench: Bench) -> Any:
    """Bytes an element of the weights, by what they are for."""
    found = {}
    bench.say(f"{'':15} {'recipe':9} gather  reduce  activations    amax    collectives")
    for name, parallel_dims in LAYOUTS.items():
        for recipe in RECIPES if parallel_dims.size > 1 else ():
            trainer, step = bench.engine_step(recipe, parallel_dims)
            step()
            step()  # DDP lays its buckets anew after the first
            with CommCounter() as traffic:
                step()
            elements = sum(p.numel() for p in trainer.model.parameters())
            each = {kind: traffic.sent[kind] / elements * 2 for kind in ("gather", "reduce", "activations")}
            found[f"{name}, {recipe}"] = {**each, "elements": elements, "calls": dict(traffic.calls)}
            numbers = "  ".join(f"{value:6.2f}" for value in each.values())
            amax, calls = traffic.sent["amax"], sum(traffic.calls.values())
            bench.say(f"{name:15} {recipe:9} {numbers}  {amax:10} B  {calls:6}")
    return found


PARTS = {"overhead": overhead, "save": save, "speed": speed, "wire": wire}


def be_rank(rank: int, meeting: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=rank, world_size=2)
    bench = Bench(options, rank)
    chosen = {name: str(value) for name, value in vars(options).items()}
    figures: dict[str, Any] = {"torch": torch.__version__, "options": chosen}
    for name in PARTS if options.part == "all" else [options.part]:
        bench.say(f"\n{name}; load {', '.join(f'{x:.1f}' for x in os.getloadavg())}, {os.cpu_count()} cores")
        figures[name] = PARTS[name](bench)
    if options.out and rank == 0:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS, "all"], nargs="?", default="all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch; a step has two")
    parser.add_argument("--recipes", default="bf16", help="of `speed`, with commas between")
    parser.add_argument("--interval", type=int, default=20, help="steps between saves")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells that it begins
    with tempfile.TemporaryDirectory() as directory:
        options.directory = directory
        multiprocessing.spawn(be_rank, (f"{directory}/meeting", options), nprocs=2)


if __name__ == "__main__":
    main()
