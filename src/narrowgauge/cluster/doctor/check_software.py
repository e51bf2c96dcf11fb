"""Is the software the one for these GPUs? Verdicts on Python, torch and the driver.

CUDA's rules of compatibility: a program built with CUDA M.n runs with any driver of major version M or later,
and with one older than n it may lack what came in between ("CUDA Compatibility" of NVIDIA's documentation).
"""

from narrowgauge.cluster.doctor.facts import Facts, Item, dotted, miss, ok, warn

_OLDEST_PYTHON, _OLDEST_TORCH = (3, 11), (2, 11)
_NAMES = {"cuda": "CUDA", "rocm": "ROCm"}
_BUILDS = {"nvidia": "cuda", "amd": "rocm"}
_MAKERS = {"nvidia": "NVIDIA", "amd": "AMD"}


def check_software(facts: Facts) -> list[Item]:
    """The items of this file, in the order in which they are fixed."""
    return [_python(facts), _torch(facts), _driver(facts)]


def _python(facts: Facts) -> Item:
    version = facts.software.python
    if version[:2] < _OLDEST_PYTHON:
        return miss("python", dotted(version), f"install Python {dotted(_OLDEST_PYTHON)} or later")
    return ok("python", dotted(version))


def _torch(facts: Facts) -> Item:
    software = facts.software
    library = f" {dotted(software.library)}" if software.build != "cpu" else ""
    found = f"{software.torch}, built for {_NAMES.get(software.build, 'CPUs')}{library}"
    if _release(software.torch) < _OLDEST_TORCH:
        return miss("torch", found, f"install torch {dotted(_OLDEST_TORCH)} or later")
    makers = set(facts.hardware.makers)
    if makers and not any(_BUILDS[maker] == software.build for maker in makers):
        maker = sorted(makers)[-1]
        return miss(
            "torch",
            f"{found}; this machine has {_gpus(facts, maker)}",
            f"install {_right_build(facts, maker)} instead (pytorch.org, 'Get Started', has the line)",
        )
    return ok("torch", found)


def _gpus(facts: Facts, maker: str) -> str:
    number = facts.hardware.makers.count(maker)
    return f"{number} {_MAKERS[maker]} GPU{'s' if number > 1 else ''}"


def _right_build(facts: Facts, maker: str) -> str:
    """The build of torch that a GPU of this maker takes."""
    newest = facts.hardware.driver_cuda
    if maker == "nvidia" and newest:
        return f"a torch built for CUDA {dotted(newest)} or earlier, the newest that driver knows"
    return f"a torch built for {_NAMES[_BUILDS[maker]]}"


def _driver(facts: Facts) -> Item:
    hardware, software = facts.hardware, facts.software
    if not hardware.makers:
        return ok("driver", "no GPU, no driver")
    newest = hardware.driver_cuda
    found = hardware.driver or "of unknown version"
    if "nvidia" not in hardware.makers:
        return ok("driver", f"amdgpu {found}")
    if newest is None:
        return miss(
            "driver",
            f"NVIDIA {found}, and its library libcuda.so.1 does not load",
            "install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all)",
        )
    found = f"NVIDIA {found}, for CUDA up to {dotted(newest)}"
    if software.build != "cuda" or newest >= software.library:
        return ok("driver", found)
    built = f"torch was built for CUDA {dotted(software.library)}"
    fix = f"update the driver, or install a torch built for CUDA {dotted(newest)} or earlier"
    if newest[0] < software.library[0]:
        return miss("driver", f"{found}; {built}", fix)
    return warn("driver", f"{found}; {built}: it runs, without what is newer than the driver", fix)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
