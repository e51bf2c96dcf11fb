"""What a busy machine costs: steps and quantization on quiet cores, and beside another process.

    python benchmarks/busy.py [--seconds 4] [--rounds 3] [--settings none GOMP_SPINCOUNT=1000] [--two-threads]

Threads of an operation wait for each other at its end, and they spin while they wait. Beside another process
one of them is often not on a core, and each of the many small operations of a step waits for it. Each setting
is the environment of a process of its own, because the threads read it when torch is loaded. `none` is what
torch does by itself, `ours` is the number of threads that `narrowgauge train` would choose. Quiet and busy
take turns, round by round; medians and their range are printed. The machine has to be quiet otherwise.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import narrowgauge.system.operating_system  # noqa: F401  it looks at the machine from here on

ONE = "while True: pass"
TWO = "import torch\na = torch.ones(1 << 16)\nwhile True: a.exp_()"


def rate(action: Callable[[], None], amount: float, seconds: float) -> float:
    """The amount per second, by the wall clock: what a user waits for."""
    action()
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        action()
        n += 1
    return n * amount / (time.perf_counter() - start)


def work(seconds: float) -> None:
    """What is measured, in a process of its own; its figures are one line of JSON."""
    import torch

    import narrowgauge as ng
    from narrowgauge.nn import DTYPES, set_step
    from narrowgauge.trainer.models import Transformer, initialize, model_config
    from narrowgauge.trainer.runs.monitor.machine import threads_of

    figures = {}
    if os.environ.get("BUSY_SETTING") == "ours":
        torch.set_num_threads(threads_of([])[0])
    for name in ("bf16", "fp8"):
        r = ng.recipe(name)
        config = model_config("debug")
        model = Transformer(config, DTYPES[r.compute])
        initialize(model, 0)
        ng.convert(model, r)
        tokens = torch.randint(config.vocab_size, (8, 257), generator=torch.Generator().manual_seed(0))

        def step(model: Transformer = model, tokens: torch.Tensor = tokens) -> None:
            set_step(model, 0, 1, 0)
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            model.zero_grad()

        figures[f"{name} tokens/s"] = rate(step, 8 * 256, seconds)
    x = torch.randn(2048, 2048)
    figures["quantize M/s"] = rate(lambda: ng.quantize(x, "nvfp4"), x.numel() / 1e6, seconds)
    print(json.dumps(figures))


@contextmanager
def beside(program: str | None) -> Iterator[None]:
    """Another process on the machine, while this is open."""
    other = subprocess.Popen([sys.executable, "-c", program]) if program else None
    if other:
        time.sleep(3 if program == TWO else 0.3)
    try:
        yield
    finally:
        if other:
            other.kill()
            other.wait()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seconds", type=float, default=4)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--settings", nargs="+", default=["none", "ours"], metavar="A=1[,B=2]")
    p.add_argument("--two-threads", action="store_true", help="the other process computes with torch")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = p.parse_args()
    if options.worker:
        return work(options.seconds)
    found: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(options.rounds):
        for setting in options.settings:
            for kind, program in (("quiet", None), ("busy", TWO if options.two_threads else ONE)):
                own = dict(item.split("=") for item in setting.split(",") if "=" in item)
                words = [sys.executable, __file__, "--worker", "--seconds", str(options.seconds)]
                with beside(program):
                    environment = os.environ | own | {"BUSY_SETTING": setting}
                    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True)
                for name, figure in json.loads(done.stdout).items():
                    found.setdefault((name, setting, kind), []).append(figure)
    for (name, setting, kind), figures in sorted(found.items()):
        low, high = min(figures), max(figures)
        print(
            f"{name:16s} {setting:28s} {kind:6s} {statistics.median(figures):9.1f}  [{low:.1f}, {high:.1f}]"
        )


if __name__ == "__main__":
    main()
