"""The verdicts on Python, torch and the driver: whether the software is the one for these GPUs.

CUDA's rules of compatibility: a program built with CUDA M.n runs with any driver of major version M or later,
and with one older than n it may lack what came in between ("CUDA Compatibility" of NVIDIA's documentation).
"""

from narrowgauge.cluster.doctor.facts import LIMITS, Facts, Verdict, count, dotted, miss, ok, release, warn

_OLDEST = LIMITS["version"]
_NAMES = {"cuda": "CUDA", "rocm": "ROCm"}
_BUILDS = {"nvidia": "cuda", "amd": "rocm"}
_MAKERS = {"nvidia": "NVIDIA", "amd": "AMD"}


def check_software(facts: Facts) -> dict[str, Verdict]:
    """The verdicts by item, in the order in which they are to be fixed."""
    return {"python": _python(facts), "torch": _torch(facts), "driver": _driver(facts)}


def _python(facts: Facts) -> Verdict:
    version, oldest = facts.software.python, _OLDEST["python"]
    if version[:2] < oldest:
        return miss(dotted(version), f"install Python {dotted(oldest)} or later")
    return ok(dotted(version))


def _torch(facts: Facts) -> Verdict:
    software, makers = facts.software, facts.hardware.makers
    library = f" {dotted(software.library)}" if software.build != "cpu" else ""
    found = f"{software.torch}, built for {_NAMES.get(software.build, 'CPUs')}{library}"
    if release(software.torch) < _OLDEST["torch"]:
        return miss(found, f"install torch {dotted(_OLDEST['torch'])} or later")
    if makers and not any(_BUILDS[maker] == software.build for maker in makers):
        maker = max(makers)
        return miss(
            f"{found}; this machine has {count(makers.count(maker), f'{_MAKERS[maker]} GPU')}",
            f"install {_right_build(facts, maker)} instead (pytorch.org, 'Get Started', has the line)",
        )
    return ok(found)


def _right_build(facts: Facts, maker: str) -> str:
    """The build of torch that a GPU of this maker takes."""
    newest = facts.hardware.driver_cuda
    if maker == "nvidia" and newest:
        return f"a torch built for CUDA {dotted(newest)} or earlier, the newest that driver knows"
    return f"a torch built for {_NAMES[_BUILDS[maker]]}"


def _driver(facts: Facts) -> Verdict:
    hardware, software = facts.hardware, facts.software
    if not hardware.makers:
        return ok("no GPU, no driver")
    newest, found = hardware.driver_cuda, hardware.driver or "of unknown version"
    if "nvidia" not in hardware.makers:
        return ok(f"amdgpu {found}")
    if newest is None:
        return miss(
            f"NVIDIA {found}, and its library libcuda.so.1 does not load",
            "install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all)",
        )
    found = f"NVIDIA {found}, for CUDA up to {dotted(newest)}"
    if software.build != "cuda" or newest >= software.library:
        return ok(found)
    built = f"torch was built for CUDA {dotted(software.library)}"
    fix = f"update the driver, or install a torch built for CUDA {dotted(newest)} or earlier"
    if newest[0] < software.library[0]:
        return miss(f"{found}; {built}", fix)
    return warn(f"{found}; {built}: it runs, without what is newer than the driver", fix)
