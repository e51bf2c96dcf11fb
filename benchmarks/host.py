"""What the host does for one micro-batch: the time that Python takes to launch it, without a GPU.

    python benchmarks/host.py [--model qwen2.5-1.5b] [--recipes fp8,bf16] [--rounds 5] [--calls] [--json]
                              [--src FOLDER ...]

The project's own code runs forward and backward passes under `accumulating`, as a run does between its first
and last micro-batch. Triton binds and looks up every launch, but for a driver that loads and launches
nothing; matmuls return memory, and one operation stands for attention, because a CPU computes both slowly.
Tensors are on the CPU and tiny, so torch's other operations cost little more than their dispatch. What CUDA
and cuBLAS do for a launch is left out, some microseconds each, so the figure is a bound from below.

Every layer costs the same, so models of 2 and of 6 layers give the cost of a layer and of the rest. The time
is processor time, the least of all rounds, and is also given in units of one addition of small tensors,
measured in the same process between the rounds: a ratio that carries over to other machines better than
seconds. `--calls` counts calls of Python functions instead, which repeat exactly. `--src` names source
folders to compare; rounds of all folders alternate, each in a process of its own.
"""

import argparse
import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

LAYERS = (2, 6)
WIDTH, HEAD, TOKENS = 64, 32, 32
_SHARED_MEMORY, _REGISTERS = 232448, 65536  # of an H200's multiprocessor


launches: list[int] = []  # one entry per kernel that Triton launched


def silence_driver() -> None:
    """Give Triton a driver of an H100 that compiles for it, and loads and launches nothing."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime.driver import driver

    class Launcher:
        def __init__(self, *_: Any) -> None:
            """Nothing to build."""

        def __call__(self, *_: Any) -> None:
            launches.append(1)

    class Silent(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            properties = {
                "max_shared_mem": _SHARED_MEMORY,
                "max_num_regs": _REGISTERS,
                "multiprocessor_count": 132,
                "warpSize": 32,
            }
            self.utils = SimpleNamespace(
                load_binary=lambda *_, **__: (0, 0, 32, 0, 1024),
                unload_module=lambda *_: None,
                get_device_properties=lambda _: properties,
            )
            self.launcher_cls = Launcher

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            return torch.device("cpu")

        def get_benchmarker(self) -> None:
            return None

        def get_device_interface(self) -> None:
            return None

        def get_empty_cache_for_benchmark(self) -> None:
            return None

        def clear_cache(self, cache: Any) -> None:
            """No cache."""

    driver.set_active(Silent())


def pretend(is_native: bool) -> None:
    """Let the package take a GPU's code on CPU tensors, and its matmuls return memory."""
    import torch

    from narrowgauge.kernels import choose_products, dispatch
    from narrowgauge.kernels.triton import rounding
    from narrowgauge.nn import gemm, linear
    from narrowgauge.recipes import Backend

    def scaled(a_MK: torch.Tensor, b_KN: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.empty(a_MK.shape[0], b_KN.shape[1], dtype=args[7])

    def summed(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
        return torch.empty(a_MK.shape[0], b_KN.shape[1], dtype=torch.float32)

    def product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
        return torch.empty(a_MK.shape[0], b_KN.shape[1], dtype=a_MK.dtype)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return q.addcmul(k, v)  # one operation that autograd differentiates by a node of its own, as there

    vars(torch.nn.functional)["scaled_dot_product_attention"] = attention
    dispatch.has_kernels = lambda device: True
    vars(rounding)["converts_to_fp8"] = lambda device: True
    backend = Backend("native" if is_native else "emulated", "")
    vars(linear)["verified_backend"] = lambda *_: backend
    vars(linear)["is_gpu"] = vars(gemm)["is_gpu"] = lambda device: True
    vars(torch)["_scaled_mm_v2"] = scaled
    gemm._summed_in_fp32, gemm._plain_product = summed, product
    choose_products("bf16")  # whatever this CPU prefers


def pass_of(model_name: str, recipe: str, layers: int, is_native: bool) -> Callable[[], None]:
    """A function that does what the host does for one micro-batch, of a narrow model with these layers."""
    import torch

    from narrowgauge.kernels.amax import begin_amaxes
    from narrowgauge.nn import convert, set_step
    from narrowgauge.nn.linear import accumulating
    from narrowgauge.trainer.models import Transformer, model_config

    widths = {"dim": WIDTH, "heads": WIDTH // HEAD, "ffn_dim": WIDTH, "vocab_size": WIDTH, "layers": layers}
    config = model_config(model_name)
    few = widths | {"kv_heads": 1 if config.kv_heads < config.heads else WIDTH // HEAD}
    model = Transformer(model_config(model_name, **few, head_dim=HEAD), torch.bfloat16)
    convert(model, recipe)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    held = ExitStack()
    held.enter_context(accumulating(model, is_native, True))
    atexit.register(held.close)

    def micro_batch() -> None:
        set_step(model, 0, 1, 0, 10)
        begin_amaxes()
        model.loss(ids, ids).backward()

    return micro_batch


def processor_seconds(action: Callable[[], object], times: int = 1) -> float:
    start = time.process_time()
    for _ in range(times):
        action()
    return (time.process_time() - start) / times


def calls_of(action: Callable[[], object]) -> int:
    """The calls of Python functions that `action` makes."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def whole(both: Iterable[float], layers: int) -> float:
    """The figure of all layers from two small models."""
    few, more = both
    a_layer = (more - few) / (LAYERS[1] - LAYERS[0])
    return few + a_layer * (layers - LAYERS[0])


def measure(model_name: str, recipe: str, rounds: int, with_calls: bool) -> dict[str, Any]:
    """The figures of one model under one recipe, in this process, which then can measure nothing else."""
    import torch

    torch.set_num_threads(1)
    silence_driver()
    is_native = recipe.startswith("fp8")
    pretend(is_native)
    from narrowgauge.trainer.models import model_config

    layers = model_config(model_name).layers
    both = [pass_of(model_name, recipe, n, is_native) for n in LAYERS]
    for micro_batch in both * 3:  # compiles, and creates gradients
        micro_batch()
    found: dict[str, Any] = {"model": model_name, "recipe": recipe, "layers": layers}
    if with_calls:
        found["calls"] = round(whole(map(calls_of, both), layers))
        return found
    a, b = torch.zeros(8), torch.ones(8)
    times: list[list[float]] = [[], []]
    additions = []
    for _ in range(rounds):
        launches.clear()
        additions.append(processor_seconds(lambda: a.add(b), 5000))
        for own, micro_batch in zip(times, both, strict=True):
            own.append(processor_seconds(micro_batch))
    seconds, addition = whole(map(min, times), layers), min(additions)
    counts = []
    for micro_batch in both:
        launches.clear()
        micro_batch()
        counts.append(len(launches))
    return found | {
        "ms": 1e3 * seconds,
        "addition_us": 1e6 * addition,
        "additions": seconds / addition,
        "triton_launches": round(whole(counts, layers)),
    }


def in_child(src: str, *arguments: str) -> dict[str, Any]:
    """`measure` in a process of its own, of the source folder `src`."""
    env = os.environ | {"PYTHONPATH": src, "OMP_NUM_THREADS": "1"}
    env.setdefault("CC", "gcc")
    out = subprocess.run(
        [sys.executable, __file__, "--one", *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert not out.returncode, out.stderr
    found: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure in processes of their own, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--recipes", default="fp8,fp8-delayed,bf16,nvfp4")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--src", nargs="+", default=[os.path.join(os.path.dirname(__file__), "../src")])
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        model, recipe, rounds, calls = args.one
        print(json.dumps(measure(model, recipe, int(rounds), calls == "calls")))
        return
    for recipe in args.recipes.split(","):
        for src in args.src:
            found = in_child(src, args.model, recipe, str(args.rounds), "calls" if args.calls else "time")
            if args.json:
                print(json.dumps(found | {"src": src}))
            elif args.calls:
                print(f"{args.model} {recipe}: {found['calls']:,} calls of Python functions ({src})")
            else:
                print(
                    f"{args.model} {recipe}: {found['ms']:.1f} ms, {found['additions']:,.0f} additions of "
                    f"{found['addition_us']:.2f} us, {found['triton_launches']:,} launches by Triton ({src})"
                )


if __name__ == "__main__":
    main()
