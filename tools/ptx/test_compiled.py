"""Compiled kernels give the digits of their references: what Triton makes for a GPU is executed here.

These are the interpreter's tests, in a process that compiles each launch for a target and executes its
PTX (`ptx`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "tests" / "kernels"
TARGETS = ("cuda:80", "cuda:89", "cuda:90", "cuda:100")
TWINS = "test_twins.py::test_a_kernel_is_its_twin_on_strange_numbers_and_shapes"
#: Tests, and the kernels that they launch.
TESTS = {
    "test_cast.py::test_every_bf16_number_has_the_code_of_a_saturating_conversion[0.37-e4m3]": ["cast_given"],
    f"{TWINS}[gradients added in FP8]": ["largest_sum", "add_sum", "note_overflow"],
    "test_cast.py::test_equals_the_reference_wherever_numbers_lie": ["largest", "cast_given", "cast_blocks"],
    "test_cast.py::test_random_rounding_takes_the_same_bits[e5m2]": ["largest", "cast_given"],
    "test_cast.py::test_random_rounding_takes_the_same_bits[nvfp4]": ["cast_blocks"],
    "test_cast.py::test_every_bf16_number_has_the_code_of_a_saturating_conversion[0.0031-e5m2]": [
        "cast_given",
    ],
    "test_activation.py::test_swiglu_of_every_bf16_rounds_where_torch_rounds": [
        "swiglu_forward", "swiglu_backward",
    ],
    "test_norm.py::test_exact_numbers_come_out_bit_for_bit": ["norm_forward"],
    "test_norm.py::test_gradients_are_those_of_double_precision": ["norm_backward"],
    f"{TWINS}[AdamW on msamp-o2's state]": ["largest", "update"],
    "test_cross_entropy.py::test_where_numbers_are_exact_every_bit_is_the_references": ["_losses"],
}  # fmt: skip


def execute(target, tests, cache):
    """Run tests on compiled kernels; each kernel that they name was executed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "PYTEST"))}
    environment |= {"NARROWGAUGE_COMPILED_FOR": target, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--tb=short", "--show-capture=no", "-rs", *(str(HERE / name) for name in tests)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    executed = json.loads(done.stdout.partition("executed ")[2].splitlines()[0])
    assert executed.keys() >= {kernel for kernels in tests.values() for kernel in kernels}


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_kernels_are_their_references(target, tmp_path):
    execute(target, TESTS, tmp_path)
