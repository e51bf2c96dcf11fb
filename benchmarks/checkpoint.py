"""How fast is a checkpoint written and verified, and what does a step pay for it?

    python benchmarks/checkpoint.py [--mib 512] [--rounds 6] [--directory DIR]

The first table: bytes a second, of `sha256` over memory, of `disk` (plain writes and one fsync), of `write`
(one safetensors file, hashed and synced), of `save` (the check for NaN, index, state, manifest, publication)
and of `verify`. They take turns, so that whatever else the machine does meets all alike. `share` is of the
slower of disk and sha256, round by round; `cpu` are seconds of processor time, which others do not disturb.
The second: the time of a loop of matrix products with a save in the background every twenty steps, over that
without.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from narrowgauge.trainer.checkpoint import AsyncSaver, save, verify
from narrowgauge.trainer.checkpoint.store.index import full_tensor
from narrowgauge.trainer.checkpoint.store.safetensors_writer import write_safetensors


def seconds(do: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of the processor."""
    begin, worked = time.perf_counter(), time.process_time()
    do()
    return time.perf_counter() - begin, time.process_time() - worked


def write_plain(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("xb", buffering=0) as file:
        for tensor in tensors.values():
            left = memoryview(tensor.numpy().data).cast("B")
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())


def hash_all(tensors: dict[str, torch.Tensor]) -> None:
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.numpy().data)


def speeds(directory: Path, mib: int, rounds: int) -> None:
    tensors = {f"w{i}": torch.randn(mib << 15) for i in range(8)}
    plain, ours, steps = directory / "plain", directory / "ours.safetensors", directory / "checkpoints"
    tasks: dict[str, Callable[[], object]] = {
        "sha256": lambda: hash_all(tensors),
        "disk": lambda: write_plain(plain, tensors),
        "write": lambda: write_safetensors(ours, tensors),
        "save": lambda: save(steps, 1, {"model": tensors}, {}, 2, "benchmark"),
        "verify": lambda: verify(steps / "step-1"),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            taken[name].append(seconds(task))
            for file in (plain, ours):  # at once, or the next one has to find other memory to write to
                file.unlink(missing_ok=True)
        shutil.rmtree(steps)
    print(f"{mib} MiB, {torch.get_num_threads()} thread(s), {os.cpu_count()} cores")
    print("        GB/s median   best   share  cpu [s]")
    slower = [max(a, b) for (a, _), (b, _) in zip(taken["sha256"], taken["disk"], strict=True)]
    for name, times in taken.items():
        share = statistics.median(s / t for s, (t, _) in zip(slower, times, strict=True))
        clock, cpu = ([pair[i] for pair in times] for i in (0, 1))
        middle, best = (mib * 2**20 / 1e9 / t for t in (statistics.median(clock), min(clock)))
        print(f"{name:8} {middle:10.2f} {best:6.2f} {share:7.2f} {statistics.median(cpu):8.2f}")


def stall(directory: Path, mib: int, rounds: int) -> None:
    x = torch.randn(512, 512)
    pieces = {"model": {f"w{i}": [full_tensor(torch.randn(mib << 14))] for i in range(16)}}

    def steps(saver: AsyncSaver | None) -> None:
        for number in range(60):
            y = x
            for _ in range(30):
                y = torch.relu(y @ x) * 1e-3
            if saver is not None and number % 20 == 0:
                saver.save(directory / "background", number, pieces, {}, 2, "benchmark")

    steps(None)
    without, beside = [], []
    with AsyncSaver() as saver:
        for _ in range(rounds):
            without.append(seconds(lambda: steps(None))[0])
            beside.append(seconds(lambda: steps(saver))[0])
            saver.wait()
    ratios = sorted(b / a for a, b in zip(without, beside, strict=True))
    step = statistics.median(without) / 60 * 1e3
    print(f"\nsteps of {step:.1f} ms with {mib} MiB saved every 20: {statistics.median(ratios):.3f} times")
    print("each round:", " ".join(f"{ratio:.3f}" for ratio in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--directory", type=Path, help="where to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        speeds(Path(name), args.mib, args.rounds)
        stall(Path(name), max(args.mib // 8, 1), args.rounds)


if __name__ == "__main__":
    main()
