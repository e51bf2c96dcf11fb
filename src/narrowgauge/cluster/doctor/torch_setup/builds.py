"""The build of torch that a GPU and its driver take.

A driver runs programs of its own major version of CUDA and of earlier ones. A build has machine code for some
generations of GPUs. V100 and older cards (compute capability below 7.5) are in the builds for CUDA 12.6
alone, because CUDA 13 has no compiler for them.
"""

import tomllib
from dataclasses import dataclass

from narrowgauge.cluster.doctor.facts import Hardware, Version, dotted
from narrowgauge.files import shipped_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A build of torch for NVIDIA GPUs.

    Attributes:
        cuda: The version of CUDA that it brings.
        capability: The lowest and the highest compute capability that it has code for.
        torch: The first and the last release with this build; the last is () where none is known.
    """

    cuda: Version
    capability: tuple[Version, Version]
    torch: tuple[Version, Version]

    def __str__(self) -> str:
        first, last = self.torch
        releases = f"{dotted(first)} or later" if not last else dotted(first)
        if last > first:
            releases += f" to {dotted(last)}"
        return f"torch {releases}, built for CUDA {dotted(self.cuda)}"


def _builds() -> tuple[Build, ...]:
    """The builds of `builds.toml`, from the oldest CUDA to the newest."""
    tables = tomllib.loads(shipped_text("cluster/doctor/torch_setup", "builds")).values()

    def pair(table: dict[str, list[list[int]]], key: str) -> tuple[Version, Version]:
        low, high = table[key]
        return tuple(low), tuple(high)

    builds = [
        Build(cuda=tuple(t["cuda"]), capability=pair(t, "capability"), torch=pair(t, "torch")) for t in tables
    ]
    return tuple(sorted(builds, key=lambda build: build.cuda))


BUILDS = _builds()


def build_for(capability: Version, driver: Version | None = None) -> Build | None:
    """The newest build that a GPU has use for and its driver knows.

    Args:
        capability: The GPU's compute capability; () if it is not known.
        driver: The newest CUDA that the driver knows; None if that is not known.

    Returns:
        The build. Where the driver knows none of them in full, but runs one of its major version, that one;
        None where no build has code for the GPU, or none runs with the driver.
    """
    has_code = [b for b in BUILDS if not capability or b.capability[0] <= capability <= b.capability[1]]
    if driver is None:
        return has_code[-1] if has_code else None
    known = [b for b in has_code if b.cuda <= driver]
    running = [b for b in has_code if b.cuda[:1] == driver[:1]]
    return known[-1] if known else running[0] if running else None


def right_build(hardware: Hardware) -> Build | None:
    """The build for the NVIDIA GPUs of a machine: for the oldest of them, if they differ."""
    seen = [gpu.capability for gpu in hardware.gpus if gpu.maker == "nvidia"]
    return build_for(min(hardware.capabilities or seen, default=()), hardware.driver_cuda)
