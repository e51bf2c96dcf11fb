"""The machine and its software, for the file that is read elsewhere."""

import platform
import subprocess

import torch

import narrowgauge
from narrowgauge.recipes import device_facts
from narrowgauge.system.operating_system import triton_version
from narrowgauge.trainer.runs.monitor.machine import device_name, total_memory

ADVICE = "narrowgauge doctor names what is missing"
NVIDIA = "driver_version,memory.total,clocks.max.sm,clocks.sm,clocks.max.mem,power.limit,temperature.gpu"
TOOL = ["nvidia-smi", f"--query-gpu={NVIDIA}", "--format=csv"]
ROCM = ["rocm-smi", "--showdriverversion", "--showclocks", "--showpower"]


def output_of(*command):
    """What a program prints; "" where there is none."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except OSError:
        return ""


def test_the_machine(record_property):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    facts = {
        "device": device_name(device),
        "facts": str(device_facts(device)),
        "devices": torch.cuda.device_count(),
        "memory": total_memory(device),
        "driver": output_of(*(ROCM if torch.version.hip else TOOL)) if is_gpu else "",
        "narrowgauge": narrowgauge.__version__,
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=40"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if is_gpu else "",
        "triton": triton_version(),
    }
    for name, value in facts.items():
        if value:
            record_property(name, str(value))  # as xdist sends it
