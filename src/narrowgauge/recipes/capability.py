"""The facts that decide what a device can multiply: its maker, its generation, and its library version.

The name of a GPU is not among them: two GPUs of one generation have the same abilities, and next year's GPU
has a new name. `devices.toml` only maps today's GPUs to generations, for questions about a device elsewhere.
"""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from typing import TYPE_CHECKING

from narrowgauge.system.devices import Device, imagined
from narrowgauge.system.errors import UserError, ending_with
from narrowgauge.system.files import shipped_text

if TYPE_CHECKING:
    import torch

#: The CUDA version assumed for a device elsewhere: the one that torch's wheels are built for. CUDA 13 dropped
#: GPUs before Turing; the last wheels that support them are built for 12.6 (`doctor` names the releases).
CUDA_ELSEWHERE, CUDA_BEFORE_TURING = (13, 0), (12, 6)
_TURING = (7, 5)
# Words in a product's full name that its short name lacks: "NVIDIA GeForce RTX 4090".
_MAKERS = re.compile(r"nvidia|geforce|amd|instinct|radeon|[\s_-]")


def device_facts(device: torch.device) -> Device:
    """The facts of a torch device, or of the GPU that it simulates (`devices.imagine`)."""
    if (facts := imagined(device)) is not None:
        return facts
    if device.type != "cuda":
        return Device(maker=device.type)
    import torch  # here, so that a device elsewhere can be described without it

    from narrowgauge.kernels.dispatch import can_compile

    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return Device(
            maker="amd",
            architecture=name.partition(":")[0],
            library=_version(torch.version.hip),
            compiles=can_compile(),
        )
    return Device(
        maker="nvidia",
        capability=torch.cuda.get_device_capability(device),
        library=_version(torch.version.cuda or "0.0"),
        compiles=can_compile(),
    )


def named_device(name: str) -> Device:
    """The facts of a device that need not be present: `sm_89`, `gfx942`, a product such as `rtx4090` (also
    its ending, `4090`, if no other product has it), or `cpu`.

    Raises:
        UserError: There is no such device; the message suggests the nearest names.
    """
    devices = _devices()
    short = _MAKERS.sub("", name.lower())
    for known in (name.lower(), short, ending_with(short, devices)):
        if known in devices:
            return devices[known]
    near = [
        n for wanted in (name.lower(), short) for n in get_close_matches(wanted, devices, n=3, cutoff=0.5)
    ]
    nearest = ", ".join(dict.fromkeys(near)) or ", ".join(n for n in devices if n.startswith("sm_"))
    raise UserError(
        f"unknown device {name!r}; the nearest are {nearest}; name a compute capability (sm_89), an AMD "
        "architecture (gfx942), a product (rtx4090) or cpu"
    )


def _devices() -> dict[str, Device]:
    """Every name in `devices.toml`, and the names of the generations themselves."""
    table = tomllib.loads(shipped_text("recipes", "devices"))
    devices = {"cpu": Device(maker="cpu")}
    for capability, products in table["nvidia"].items():
        major, minor = _version(capability)
        library = CUDA_ELSEWHERE if (major, minor) >= _TURING else CUDA_BEFORE_TURING
        device = Device(maker="nvidia", capability=(major, minor), library=library)
        devices |= dict.fromkeys([f"sm_{major}{minor}", f"{major}.{minor}", *products], device)
    for architecture, products in table["amd"].items():
        devices |= dict.fromkeys([architecture, *products], Device(maker="amd", architecture=architecture))
    return devices


def _version(text: str) -> tuple[int, int]:
    """The first two numbers of a version such as "12.9" or "7.0.51831-a3e329ad8"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
