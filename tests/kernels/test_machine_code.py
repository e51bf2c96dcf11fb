"""Every kernel compiles to machine code of the GPUs it is for, on any machine: Triton brings its assemblers.

The interpreter, under which all other tests run, takes more than the compiler does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: RTX 40 (whose code an RTX 30 runs as well), H100, B200, MI250X, MI300X; bytes of memory that the threads
#: of a block can share
TARGETS = {
    "cuda:89": 99 * 1024,
    "cuda:90": 227 * 1024,
    "cuda:100": 227 * 1024,
    "hip:gfx90a": 64 * 1024,
    "hip:gfx942": 64 * 1024,
}


#: Instructions of a cast per element at most, along either axis: the memory of an H100 takes the time of some
#: 29 for the 4 bytes of an element.
MOST = 36


# the interpreter shows the values; `release/proofs.py` runs one target where a kernel changed
@pytest.mark.tier("nightly")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_without_spilling_registers(target, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(HERE / "machine_code.py"), target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 100
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        assert kernel["shared"] <= TARGETS[target], kernel
    converting = [kernel for kernel in found if "conversions" in kernel]
    assert bool(converting) == (target in ("cuda:90", "cuda:100"))
    for kernel in converting:
        # All elements of a thread, and directly: by way of float16 0.4 % of codes would be others.
        assert 2 * kernel["conversions"] == kernel["elements"], kernel
        assert kernel["instructions"] <= MOST * kernel["elements"], kernel
