"""What emulation costs: the step of each recipe over the bf16 step, and quantization throughput.

    python benchmarks/emulation.py [--model gpt2-124m] [--batch 4] [--length 512] [--rounds 5] [--out FILE]

All recipes are timed in one process, round by round in turn, and each round gives one ratio to bf16; the
median of the ratios and their range are printed, because the absolute time of a shared machine proves
nothing. On a CPU the time is processor time of all threads, which other work on the machine moves least, and
bf16 is multiplied in the precision that `train` would choose there; freed memory is kept, as `train` does.
Where `torchao` is installed, `to_mx` is timed beside ours on the same tensor.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

import narrowgauge as ng
from narrowgauge.nn import DTYPES, set_step
from narrowgauge.trainer.models import Transformer, initialize, model_config
from narrowgauge.trainer.runs.monitor.machine import (
    compute_by,
    measured_attention,
    measured_products,
    memory_kept,
)


def seconds(action: Callable[[], object]) -> float:
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    start = clock()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def step_of(recipe: str, model_name: str, batch: int, length: int, device: str) -> Callable[[], None]:
    """A function that does one forward and backward pass of a model under a recipe."""
    r = ng.recipe(recipe)
    config = model_config(model_name)
    model = Transformer(config, DTYPES[r.compute])
    initialize(model, 0)
    ng.convert(model, r).to(device)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, length + 1), generator=g).to(device)

    def step() -> None:
        set_step(model, 0, 50, 0, steps=100, decay=90)  # for rules that wait for a share or the decay
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        model.zero_grad(set_to_none=True)  # so that all models fit into memory side by side

    return step


def report_ratios(times: dict[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    rows = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times[reference], strict=True)]
        median = statistics.median(ratios)
        rows[name] = {"ratio": median, "low": min(ratios), "high": max(ratios), "seconds": min(own)}
        spread = f"[{min(ratios):.2f}, {max(ratios):.2f}]"
        print(f"{name:12s} {median:6.2f} x {reference}  {spread}  {min(own):.3f} s")
    return rows


def benchmark_steps(options: argparse.Namespace, device: str) -> dict[str, dict[str, float]]:
    print(
        f"\nstep (forward + backward), {options.model}, {options.batch} x {options.length} tokens, {device}"
    )
    times: dict[str, list[float]] = {}
    names = options.recipes.split(",")
    steps = {name: step_of(name, options.model, options.batch, options.length, device) for name in names}
    for step in steps.values():
        step()  # the first step allocates
    for _ in range(options.rounds):
        for name, step in steps.items():
            times.setdefault(name, []).append(seconds(step))
    return report_ratios(times, "bf16")


def benchmark_quantize(options: argparse.Namespace, device: str) -> dict[str, dict[str, float]]:
    print("\nquantize a bf16 tensor of 4096 x 4096: codes and scales")
    x = torch.randn(4096, 4096).to(torch.bfloat16).to(device)
    actions: dict[str, Callable[[], object]] = {
        name: (lambda name=name: ng.quantize(x, name))
        for name in ("mxfp8", "mxfp6-e3m2", "mxfp4", "nvfp4", "e4m3")
    }
    if find_spec("torchao"):
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        mode = ScaleCalculationMode.RCEIL
        actions["torchao mxfp8"] = lambda: to_mx(x, torch.float8_e4m3fn, 32, mode)
        actions["torchao mxfp6-e3m2"] = lambda: to_mx(x, "fp6_e3m2", 32, mode)
        actions["torchao mxfp4"] = lambda: to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
    times: dict[str, list[float]] = {}
    for action in actions.values():
        action()
    for _ in range(options.rounds):
        for name, action in actions.items():
            times.setdefault(name, []).append(seconds(action))
    rows = {}
    for name, own in times.items():
        rows[name] = {"gigaelements_per_s": x.numel() / statistics.median(own) / 1e9}
        print(f"{name:18s} {rows[name]['gigaelements_per_s']:.3f} G elements/s (median)")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipes", default=",".join(ng.recipe_names()))
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    if device == "cpu":
        attention = measured_attention(model_config(options.model).head_dim, options.length)
        arithmetic = {"products": measured_products(), "attention": attention}
        compute_by(arithmetic)
        results |= arithmetic
    with memory_kept(torch.device(device)):
        figures = results | {
            "step": benchmark_steps(options, device),
            "quantize": benchmark_quantize(options, device),
        }
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
