"""What do gauges take? The time of a step with every place read, against the same step without.

    python benchmarks/gauges.py [--model debug] [--recipes bf16,fp8,nvfp4] [--pairs 15] [--device auto]

Steps alternate, read and unread, so that whatever else the machine does meets both alike; medians, and
quartiles in brackets. `share` is what a run pays at its `gauges.every` (`--every`): the extra time of one
step spread over so many. Writing the lines of gauges.jsonl is part of it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from narrowgauge.nn import Gauges
from narrowgauge.trainer.data import open_data
from narrowgauge.trainer.runs.monitor.machine import choose_device, synchronize
from narrowgauge.trainer.runs.run_directory import RunDirectory
from narrowgauge.trainer.training.config.config import make_config
from narrowgauge.trainer.training.config.schema import GAUGES_EVERY
from narrowgauge.trainer.training.step.trainer import Trainer


def measure(args: argparse.Namespace, recipe: str, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of steps without gauges, and with."""
    config = make_config(
        {
            "model": {"name": args.model},
            "data": {"source": args.data, "sequence_length": args.length},
            "training": {
                "batch_size": args.batch,
                "micro_batch_size": args.micro_batch or args.batch,
                "device": args.device,
                "steps": 10**6,
            },
            "recipe": {"name": recipe},
        }
    )
    device = choose_device(args.device)
    dataset = open_data(config.data.source, config.data.tokenizer, config.data.weights, lambda *_: None)
    trainer, directory = Trainer.begin(config, device), RunDirectory(folder)
    without: list[float] = []
    read: list[float] = []
    with trainer.batches(dataset.train) as batches:
        for _ in range(3):
            trainer.train_step(batches)
        for i in range(2 * args.pairs + 2):
            synchronize(device)
            start = time.perf_counter()
            gauges = Gauges.of(trainer.model, trainer.optimizer, trainer.names) if i % 2 else None
            trainer.train_step(batches, gauges=gauges)
            if gauges is not None:
                directory.record_gauges(gauges.lines(trainer.step))
            (read if i % 2 else without).append(time.perf_counter() - start)
    return without[1:], read[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="debug")
    parser.add_argument("--recipes", default="bf16,fp8,mxfp8,nvfp4,msamp-o2")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=0, help="0: the whole batch at once")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--every", type=int, default=GAUGES_EVERY)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    print(f"{args.model}, {args.batch} x {args.length} tokens, {torch.get_num_threads()} thread(s)")
    print("recipe        step [ms]                 read [ms]                 ratio   share")
    for recipe in args.recipes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            without, read = measure(args, recipe, Path(folder))
        a, b = statistics.median(without), statistics.median(read)
        share = (b - a) / a / args.every
        print(
            f"{recipe:12}  {_words(without)}  {_words(read)}  {b / a:5.2f}  {100 * share:5.2f} %", flush=True
        )


def _words(seconds: list[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, median, high = (1000 * q for q in statistics.quantiles(seconds, n=4))
    return f"{median:7.1f} ({low:7.1f} {high:7.1f})"


if __name__ == "__main__":
    main()
