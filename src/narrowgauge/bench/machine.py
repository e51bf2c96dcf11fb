"""Facts about a machine and its software, for a file that is read elsewhere."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import narrowgauge
from narrowgauge.processes import output_of
from narrowgauge.runs.monitor.hardware import device_name, total_memory
from narrowgauge.triton_version import triton_version

_SECONDS = 15.0  # time limit of a driver's tool
_NVIDIA = (
    "name,driver_version,memory.total,clocks.max.sm,clocks.sm,clocks.max.mem,power.limit,temperature.gpu"
)


def machine_facts(device: torch.device) -> dict[str, object]:
    """Versions, commit, device, driver, clocks, power and command, as JSON values."""
    facts: dict[str, object] = {
        "narrowgauge": _own_version(),
        "commit": _commit(),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "device": device_name(device),
        "memory": total_memory(device),
    }
    optional = {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "triton": triton_version(),
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
    }
    facts |= {name: value for name, value in optional.items() if value}
    if device.type == "cuda":
        facts["devices"] = torch.cuda.device_count()
        facts["driver"] = _driver()
    return facts


def _own_version() -> str:
    try:
        return version("narrowgauge")
    except PackageNotFoundError:
        return "unknown"


def _commit() -> str:
    """The commit of the checkout that this package runs from; "" if it is installed."""
    root = Path(narrowgauge.__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    found = output_of(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"], _SECONDS)
    return found.out.strip()


def _driver() -> str:
    """The output of the driver's tool for each GPU; "" if the tool is missing."""
    if torch.version.hip:
        return output_of(["rocm-smi", "--showdriverversion", "--showclocks", "--showpower"], _SECONDS).out
    return output_of(["nvidia-smi", f"--query-gpu={_NVIDIA}", "--format=csv"], _SECONDS).out
