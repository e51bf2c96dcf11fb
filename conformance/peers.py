"""Runs test suites of other libraries with narrowgauge's arithmetic in the place of theirs.

    pip install absl-py
    python conformance/peers.py --ml-dtypes CHECKOUT --te CHECKOUT --nanochat CHECKOUT

It prints, and keeps in `peers.csv`, how many results are the library's own, bit for bit:

    ml_dtypes   its installed package under its own tests: every conversion that they ask for gives
                narrowgauge's code instead, and their assertions judge it. A case is a number; one that
                overflows is left out, as it becomes NaN or infinity there, and saturates here
    te          TransformerEngine: the tests that hold its kernels against its references in PyTorch, with
                narrowgauge's casts for kernels, on a CPU. A case is a test; what it skips is left out
    nanochat    `fp8.py` has no tests: its quantization of tensors of many sizes, dtypes and magnitudes

Nothing of theirs is copied: test files are read from the checkouts, and packages that need a GPU are replaced
by modules in memory (`adapters/checkouts.py`). Each library runs in its own process.
"""

import argparse
import ast
import csv
import os
import subprocess
import sys
import threading
from collections import Counter
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent / "adapters"))
from checkouts import package
from shared import checked_out

import narrowgauge as ng
from narrowgauge.formats import format, pack, round_to
from narrowgauge.quantization.transforms import hadamard

HERE = Path(__file__).parent
TABLE, COLUMNS = HERE / "peers.csv", ("library", "version", "cases", "agree", "differ")
Counts = tuple[int, int]  # cases, and those that agree


class Outcomes(Counter[str]):
    """A plugin of pytest that counts the outcomes of tests."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test when it ends."""
        self[report.outcome] += report.when == "call" or report.outcome != "passed"


def run_tests(file: Path, chosen: str = "") -> Outcomes:
    """The outcomes of a test file; those of `chosen`."""
    outcomes = Outcomes()
    options = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-k", chosen]
    pytest.main([f"--rootdir={file.parent}", *options, str(file)], plugins=[outcomes])
    return outcomes


# ------------------------------------------------------------------------------------------------ ml_dtypes

NAMES = {
    **{"bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float8_e8m0fnu": "e8m0"},
    **{"float8_e4m3fnuz": "e4m3fnuz", "float8_e5m2fnuz": "e5m2fnuz"},
    **{"float6_e2m3fn": "e2m3", "float6_e3m2fn": "e3m2", "float4_e2m1fn": "e2m1"},
}


class EveryCall(ast.NodeTransformer):
    """Turns `f(...)` into `_call(f, ...)`."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Rewrite a call and those inside it."""
        self.generic_visit(node)
        return ast.Call(ast.Name("_call", ast.Load()), [node.func, *node.args], node.keywords)


def ml_dtypes(checkout: Path) -> Counts:
    """The numbers that its tests convert."""
    ours = {getattr(import_module("ml_dtypes"), name): format(short) for name, short in NAMES.items()}
    cases = agree = 0
    lock = threading.Lock()

    def call(function: Any, *args: Any, **options: Any) -> Any:
        nonlocal cases, agree
        theirs = function(*args, **options)
        is_astype = getattr(function, "__name__", "") == "astype" and len(args) == 1
        x, to = (function.__self__, args[0]) if is_astype else (args[0] if args else None, function)
        to = to if isinstance(to, type) else None
        if to not in ours or options or not isinstance(x, float | int | np.ndarray | np.generic):
            return theirs
        given, fmt = np.asarray(x), ours[to]
        is_number = given.dtype.kind in "fiu" or given.dtype.type in ours
        if not is_number or given.dtype == np.longdouble:
            return theirs
        wide = np.array(given, np.float64, order="C")
        # E8M0 has no zero, and the narrowest formats have no code for NaN.
        counted = np.abs(wide) <= fmt.max
        if not fmt.has_infinity and fmt.nan_code is not None:
            counted |= np.isnan(wide)
        counted &= fmt.signed | (wide > 0)
        rounded = round_to(torch.from_numpy(wide), fmt).numpy()
        theirs_wide = np.asarray(theirs).astype(np.float64)
        equal = (rounded == theirs_wide) & (np.signbit(rounded) == np.signbit(theirs_wide))
        equal |= np.isnan(rounded) & np.isnan(theirs_wide)
        with lock:
            cases, agree = cases + int(counted.sum()), agree + int((counted & equal).sum())
        if not counted.all():
            return theirs
        result = rounded.astype(np.float32).astype(to)  # exact: the number is one of the type's
        return result if isinstance(theirs, np.ndarray) else result[()]

    folder = checkout / "ml_dtypes" / "tests"
    sys.path.insert(0, str(folder))
    file = folder / "custom_float_test.py"
    sys.modules[file.stem] = module = ModuleType(file.stem)  # which pytest then imports
    vars(module).update(__file__=str(file), _call=call)
    tree = ast.fix_missing_locations(EveryCall().visit(ast.parse(file.read_text(encoding="utf-8"))))
    exec(compile(tree, file, "exec"), vars(module))
    run_tests(file)
    return cases, agree


# ---------------------------------------------------------------------------------------- TransformerEngine


class OnCPU(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call without the device."""
        kwargs = {k: v for k, v in (kwargs or {}).items() if k != "device"}
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


class StandIn(ModuleType):
    """A module that has a class of every name."""

    def __getattr__(self, name: str) -> Any:
        """Make the class; a name in small letters may be a module of a folder."""
        if name.startswith("__") or (self.__path__ and name.islower()):
            raise AttributeError(name)
        return type(name, (), {})


class Quantizer:
    """What TransformerEngine's quantizers are made and called like; its references have it for a base."""

    def __init__(self, rowwise: bool = True, columnwise: bool = False, **options: Any) -> None:
        self.options = SimpleNamespace(**options)
        self.set_usage(rowwise, columnwise)

    def set_usage(self, rowwise: bool, columnwise: bool) -> None:
        """Choose the directions."""
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def make_empty(self, *_: Any, **__: Any) -> None:
        """Nothing: the result is new."""

    def update_quantized(self, x: torch.Tensor, _: object) -> SimpleNamespace:
        """As a call."""
        return self(x)

    def __call__(self, x: torch.Tensor) -> SimpleNamespace:
        """The two directions of a matrix, each with codes, scales and amax."""
        row = self.quantize(x, "rowwise") if self.rowwise_usage else (None,) * 3
        column = self.quantize(x.T.contiguous(), "columnwise") if self.columnwise_usage else (None,) * 3
        names = [
            f"_{part}"
            for way in ("rowwise", "columnwise")
            for part in (f"{way}_data", f"{way}_scale_inv", f"amax_{way}")
        ]
        return SimpleNamespace(**dict(zip(names, (*row, *column), strict=True)))

    def quantize(self, x: torch.Tensor, way: str) -> tuple[Any, Any, Any]:
        """Codes, scales and amax of one direction."""
        raise NotImplementedError


class NVFP4(Quantizer):
    """NVFP4, also in squares, under a scale a row, with four-over-six or a Hadamard transform."""

    def quantize(self, x: torch.Tensor, way: str) -> tuple[Any, Any, Any]:
        """Codes two to a byte, E4M3 codes of scales, and the amax."""
        o = self.options
        is_square, is_by_row = (
            getattr(o, key, False) for key in ("with_2d_quantization", "row_scaled_nvfp4")
        )
        table: dict[str, Any] = {"element": "e2m1", "scale": "e4m3", "block": [16, 16] if is_square else 16}
        table["tensor_scale"] = "row" if is_by_row else "tensor"
        if getattr(o, "nvfp4_use_4over6", False):
            if os.environ.get("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH") == "1":
                pytest.skip("narrowgauge has no approximate errors")
            table |= {"candidates": [6, 4], "choose": o.nvfp4_4over6_err_mode.lower()}
            table["scale_target"] = o.nvfp4_e4m3_max
        if getattr(o, "with_rht", False) and way == "columnwise":
            table["hadamard"] = 16
            table["signs"] = [] if getattr(o, "with_random_sign_mask", True) else [1] * 16
        q = ng.quantize(x, table)
        seen = hadamard(x, 16, -1, table.get("signs", ())) if "hadamard" in table else x
        amax = seen.float().abs()
        amax = amax.amax(1) if is_by_row else amax.amax().reshape(1)
        codes = q.scale_codes.repeat_interleave(16, 0) if is_square else q.scale_codes
        return pack(q.codes, q.cast.element), codes, amax


class Float8Block(Quantizer):
    """FP8 in rows or squares of 128, with scales laid out as their kernels read them."""

    def quantize(self, x: torch.Tensor, way: str) -> tuple[Any, Any, Any]:
        """Codes, and decoded scales."""
        o, side = self.options, 128 if self.options.block_scaling_dim == 2 else 1
        table = {"element": o.fp8_dtype, "scale": "fp32", "block": [side, 128]}
        q = ng.quantize(x, table | {"power_of_two": o.force_pow_2_scales})
        reference = import_module("references.blockwise_quantizer_reference")
        made = reference.QuantizeResult(q.codes, q.scales, None, None)
        munger = reference.BlockwiseQuantizerReference().scale_munger
        return q.codes, munger.munge_scale_shapes_for_backend(made, (side, 128)).scale, None


class Float8Current(Quantizer):
    """FP8 under one scale."""

    def __call__(self, x: torch.Tensor) -> SimpleNamespace:
        """Codes in the shape of x and with the last axis first, and the decoded scale."""
        table = {"element": self.options.fp8_dtype, "scale": "fp32", "block": "tensor"}
        q = ng.quantize(x.reshape(1, -1), table | {"power_of_two": self.options.force_pow_2_scales})
        codes, values = q.codes.view(x.shape), q.dequantize(x.dtype).view(x.shape)
        moved = codes.movedim(-1, 0).contiguous() if codes.ndim > 1 else codes
        parts = {"_data": codes, "_scale_inv": q.scales.reshape(1), "_transpose": moved}
        return SimpleNamespace(**parts, dequantize=lambda: values)


TE_TESTS = {
    "nvfp4/test_nvfp4_quantize_exact.py": "not python_allocator",
    "nvfp4/test_nvfp4_rht_quantize_exact.py": "not python_allocator",
    "test_float8_blockwise_scaling_exact.py": "test_quantization",
    "test_quantized_tensor.py": "TestCurrentScalingFloat8Tensor and test_quantize",
}
LARGE = "not 1024 and not 2000 and not 2048 and not 8192 and not 16384"
STAND_INS = (
    *(".common", ".common.recipe", ".pytorch.constants", ".pytorch.quantized_tensor", ".pytorch.tensor"),
    *(".pytorch.tensor.utils", ".pytorch.utils", "_torch"),
)


def transformer_engine(checkout: Path) -> Counts:
    """The tests of its quantization kernels, but for matrices above a million numbers."""
    root, tests = checkout / "transformer_engine", checkout / "tests" / "pytorch"
    dtype = SimpleNamespace(kFloat4E2M1="e2m1", kFloat8E4M3="e4m3", kFloat8E5M2="e5m2")
    elements = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    kernels = {"NVFP4Quantizer": NVFP4, "Float8BlockQuantizer": Float8Block, "DType": dtype}
    kernels |= {"Float8CurrentScalingQuantizer": Float8Current, "Quantizer": Quantizer}
    kernels |= {"TE_DType": elements, "TE_DType_To_Torch": {v: k for k, v in elements.items()}}
    kernels |= {"get_device_compute_capability": lambda: (9, 0)}
    kernels |= {"is_non_tn_fp8_gemm_supported": lambda: False}
    for kind in ("fp8", "nvfp4", "mxfp8", "fp8_block_scaling"):
        kernels[f"is_{kind}_available"] = lambda return_reason=False: (True, "") if return_reason else True
    paths: dict[str, Path | None] = {
        "transformer_engine": root,
        "transformer_engine.pytorch": root / "pytorch",
    }
    paths["transformer_engine.pytorch.custom_recipes"] = root / "pytorch" / "custom_recipes"
    paths |= {f"transformer_engine{name}": None for name in STAND_INS}
    paths |= {"test_float8_current_scaling_exact": None, "utils": None, "references": tests / "references"}
    for name, path in paths.items():
        sys.modules[name] = module = StandIn(name)
        vars(module).update(kernels, __path__=[str(path)] if path else [])
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    with OnCPU():
        ended = [run_tests(tests / file, f"({chosen}) and {LARGE}") for file, chosen in TE_TESTS.items()]
    passed, failed = (sum(outcomes[how] for outcomes in ended) for how in ("passed", "failed"))
    return passed + failed, passed


# ------------------------------------------------------------------------------------------------- nanochat


def nanochat(checkout: Path) -> Counts:
    """Codes and scales of its FP8 casts."""
    package("nanochat", checkout / "nanochat")
    package("nanochat.common", COMPUTE_DTYPE=torch.bfloat16)
    to_fp8 = import_module("nanochat.fp8")._to_fp8
    cases = agree = 0
    shapes = ((1, 16), (7, 45), (64, 64), (33, 257), (128, 512))
    for seed, shape in enumerate(shapes):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for power in range(-20, 5):  # below 1e-12 they count a tensor's largest number as 1e-12
                x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**power
                for name, to in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
                    codes, inverse = to_fp8(x.to(dtype), to)
                    q = ng.quantize(x.to(dtype), name)
                    cases += 1
                    agree += torch.equal(codes.view(torch.uint8), q.codes) and torch.equal(inverse, q.scales)
    return cases, agree


RUNS = {"ml_dtypes": ml_dtypes, "te": transformer_engine, "nanochat": nanochat}


def run(library: str, checkout: Path) -> None:
    """Run one library in this process, and keep its row."""
    os.environ["CHECKOUT"] = str(checkout)
    cases, agree = RUNS[library](checkout)
    version = metadata.version("ml_dtypes") if library == "ml_dtypes" else checked_out("CHECKOUT")()
    rows = {row["library"]: row for row in csv.DictReader(TABLE.open())} if TABLE.exists() else {}
    rows[library] = dict(zip(COLUMNS, (library, version, cases, agree, cases - agree), strict=True))
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows[name] for name in RUNS if name in rows)


def main() -> None:
    """Run each library in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in RUNS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, metavar="CHECKOUT")
    given = {name: path.resolve() for name, path in vars(parser.parse_args()).items() if path}
    for name, path in given.items():
        child = "import sys, pathlib, peers; peers.run(sys.argv[1], pathlib.Path(sys.argv[2]))"
        subprocess.run([sys.executable, "-c", child, name, path], check=True, cwd=HERE)
    print(TABLE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
