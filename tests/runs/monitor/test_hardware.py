import platform
import subprocess
import sys

import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.runs.monitor import hardware


def test_auto_takes_the_gpu_if_there_is_one():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert hardware.choose_device("auto").type == kind
    assert hardware.choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("wish", "gpus", "words"),
    [
        ("gpu", 0, "unknown device .*a GPU of NVIDIA or AMD is 'cuda'"),
        *(
            (wish, 0, "unknown device .*auto, cpu, cuda")
            for wish in ("cudax", "cpu:x", "auto:1", "cuda:", "")
        ),
        *((wish, 0, f"device = '{wish}', .* sees no GPU; use --device cpu") for wish in ("cuda", "cuda:1")),
        ("cuda:2", 2, r"device = 'cuda:2', .* last GPU .* 'cuda:1'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(wish, gpus, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert not gpus or hardware.choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=words):
        hardware.choose_device(wish)


def test_memory_is_in_bytes():
    assert 50e6 < hardware.memory_at_peak(torch.device("cpu"))["allocated"] < 1e12


PAGES = """
import resource, torch
from pathlib import Path
from narrowgauge.trainer.runs.monitor.hardware import (memory_kept)

def pages_taken():
    "By ten tensors of 64 MiB, one after the other: more than glibc ever keeps by itself (32 MiB)."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def bytes_held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

with memory_kept(torch.device("meta")):
    elsewhere = pages_taken()
with memory_kept(torch.device("cpu")):
    pages_taken()
    kept, held = pages_taken(), bytes_held()
print(elsewhere, kept, held - bytes_held())
"""


@pytest.mark.tier("nightly")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="memory is kept with glibc only")
def test_memory_that_was_freed_is_used_again_without_the_kernel():
    """In a separate process with an unused heap; a page may be a huge one of 2 MiB."""
    told = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, check=True).stdout
    elsewhere, kept, given_back = map(int, told.split())
    assert elsewhere >= 10 * 32
    assert kept < 10
    assert given_back > 60 * 2**20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch without one has no such flags")
def test_split_products_of_a_gpu_are_summed_in_fp32():
    hardware.use_device(torch.device("cuda", 0))
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
