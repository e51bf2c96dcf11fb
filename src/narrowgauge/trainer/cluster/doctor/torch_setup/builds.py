"""The build of torch for a given GPU and driver.

A driver runs programs built for its major version of CUDA and for earlier ones. A build has machine code for
some generations of GPUs. V100 and older cards (compute capability below 7.5) are supported only by the builds
for CUDA 12.6, because CUDA 13 cannot compile for them.
"""

from dataclasses import dataclass

from narrowgauge.trainer.cluster.doctor.facts import Facts, Version, dotted, figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A build of torch for NVIDIA GPUs."""

    cuda: Version  # that it includes
    capability: tuple[Version, Version]  # the lowest and the highest that it has code for
    torch: tuple[Version, Version]  # the first and the last release with this build; () if unknown

    def __str__(self) -> str:
        first, last = self.torch
        releases = f"{dotted(first)} or later" if not last else dotted(first)
        if last > first:
            releases += f" to {dotted(last)}"
        return f"torch {releases}, built for CUDA {dotted(self.cuda)}"


_TABLES = figures("trainer/cluster/doctor/torch_setup", "builds").values()
BUILDS = sorted((Build(**table) for table in _TABLES), key=lambda build: build.cuda)


def build_for(capability: Version, driver: Version | None = None) -> Build | None:
    """The newest build that supports both the GPU (() if unknown) and the newest CUDA of its driver.

    If the driver supports none of them fully, one of the driver's major version; None if no build has code
    for the GPU or none runs with the driver.
    """
    has_code = [b for b in BUILDS if not capability or b.capability[0] <= capability <= b.capability[1]]
    if driver is None:
        return has_code[-1] if has_code else None
    known = [b for b in has_code if b.cuda <= driver]
    running = [b for b in has_code if b.cuda[:1] == driver[:1]]
    return known[-1] if known else running[0] if running else None


def right_build(facts: Facts) -> Build | None:
    """The build for the NVIDIA GPUs of a machine: for the oldest of them, if they differ."""
    seen = [gpu.capability for gpu in facts.gpus if gpu.maker == "nvidia"]
    return build_for(min(facts.capabilities or seen, default=()), facts.driver_cuda)
