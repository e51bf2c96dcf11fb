"""How fast are batches made? Tokens a second of the loader, from a mixture of two mapped files.

    python benchmarks/loader.py [--length 1024] [--batch 32] [--tokens 100000000] [--seconds 5]

A GPU is kept busy where this is well above what its training takes. `waiting` is the share of the time that
steps of so many milliseconds, each begun when its batch is there, wait for batches.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from narrowgauge.trainer.data import (
    Loader,
    Mixture,
    TokenStream,
    first_samples,
    open_token_file,
    shares_of,
    write_token_file,
)


def measure(
    mixture: Mixture, args: argparse.Namespace, workers: int, separate_documents: bool, step_s: float
) -> tuple[float, float]:
    """(tokens a second, share of the time spent waiting)"""
    firsts = first_samples(0, args.batch, args.batch)
    with Loader(mixture, 0, firsts, args.batch, args.length, separate_documents, workers=workers) as loader:
        next(loader)
        start, waited, batches = time.perf_counter(), 0.0, 0
        while time.perf_counter() - start < args.seconds:
            before = time.perf_counter()
            next(loader)
            waited += time.perf_counter() - before
            time.sleep(step_s)
            batches += 1
        elapsed = time.perf_counter() - start
    return batches * args.batch * args.length / elapsed, waited / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--seconds", type=float, default=5)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        streams = []
        for i in range(2):
            path = Path(folder) / f"{i}.bin"
            chunks = (rng.integers(0, 50257, 10_000_000) for _ in range(args.tokens // 10_000_000))
            write_token_file(path, chunks, 50257)
            streams.append(TokenStream((open_token_file(path),), (50256,)))
        mixture = Mixture(tuple(streams), shares_of([0.7, 0.3]))
        for kind, separate_documents in (("packed", False), ("apart", True)):
            for workers in (1, 2):
                rate, _ = measure(mixture, args, workers, separate_documents, 0)
                print(f"documents {kind}, {workers} thread(s): {rate / 1e6:.1f} M tokens/s")
        for milliseconds in (2, 10, 50):
            rate, waiting = measure(mixture, args, 1, False, milliseconds / 1000)
            print(f"steps of {milliseconds} ms: {rate / 1e6:.2f} M tokens/s, {100 * waiting:.2f} % waiting")


if __name__ == "__main__":
    main()
