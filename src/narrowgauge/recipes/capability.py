"""The facts that decide what a device can multiply: its maker, its generation, the library that drives it.

The name of the product is none of them: two products of one generation can do the same, and next year's
product has a new name.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The facts that decide which code runs.

    Attributes:
        maker: "cpu", "nvidia", "amd", or torch's name for another type of device.
        capability: The compute capability of an NVIDIA GPU, such as (9, 0).
        architecture: The architecture of an AMD GPU, such as "gfx942".
        library: The version of the CUDA or ROCm that torch was built with, such as (12, 9).
    """

    maker: str
    capability: tuple[int, int] = (0, 0)
    architecture: str = ""
    library: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        match self.maker:
            case "nvidia":
                return "compute capability " + ".".join(map(str, self.capability))
            case "amd":
                return self.architecture
            case "cpu":
                return "a CPU"
            case _:
                return self.maker


def device_facts(device: torch.device) -> Device:
    """The facts of a torch device."""
    if device.type != "cuda":
        return Device(maker=device.type)
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return Device(maker="amd", architecture=name.partition(":")[0], library=_version(torch.version.hip))
    return Device(
        maker="nvidia",
        capability=torch.cuda.get_device_capability(device),
        library=_version(torch.version.cuda or "0.0"),
    )


def _version(text: str) -> tuple[int, int]:
    """The first two numbers of a version such as "12.9" or "7.0.51831-a3e329ad8"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
