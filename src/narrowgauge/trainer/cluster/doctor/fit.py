"""Whether the software and the GPUs fit this machine: the system, Python, packages, torch, driver, recipes.

CUDA's compatibility rules: a program built with CUDA M.n runs with any driver of major version M or later;
with a driver older than n it may lack features added in between (NVIDIA, "CUDA Compatibility"). Machine code
for sm_XY runs on a GPU of capability X.Z with Z >= Y; PTX, called compute_XY, on every later GPU ("CUDA C++
Programming Guide", binary and PTX compatibility). V100 and older cards (compute capability below 7.5) are
supported only by torch's builds for CUDA 12.6, because CUDA 13 cannot compile for them.
"""

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations

from narrowgauge.recipes import choose_backend, recipe, recipe_names
from narrowgauge.system.devices import Device
from narrowgauge.system.units import human_bytes
from narrowgauge.trainer.cluster.doctor import facts as known
from narrowgauge.trainer.cluster.doctor.facts import Facts, Gpu, Verdict, Version, dotted, miss, ok, warn
from narrowgauge.trainer.cluster.doctor.torch_setup import fix_of, is_absent

_BOUNDS = known.LIMITS["version"]
_BUILDS = sorted(known.figures("builds").values(), key=lambda build: build["cuda"])
_NAMES = {"cuda": "CUDA", "rocm": "ROCm"}
_BUILD_OF = {"nvidia": "cuda", "amd": "rocm"}
_MAKERS = {"nvidia": "NVIDIA", "amd": "AMD"}
_WHERE = "(pytorch.org, 'Get Started', has the line)"


def build_for(capability: Version, driver: Version | None = None) -> str:
    """The newest build of torch that supports both the GPU (() if unknown) and the newest CUDA of its driver.

    If the driver supports none of them fully, one of the driver's major version; "" if no build has code for
    the GPU or none runs with the driver.
    """
    builds = [b for b in _BUILDS if not capability or b["capability"][0] <= capability <= b["capability"][1]]
    if driver is not None:
        full = [build for build in builds if build["cuda"] <= driver]
        builds = full or [build for build in builds if build["cuda"][:1] == driver[:1]][:1]
    if not builds:
        return ""
    first, last = builds[-1]["torch"]
    releases = f"{dotted(first)} or later" if not last else dotted(first)
    releases += f" to {dotted(last)}" if last > first else ""
    return f"torch {releases}, built for CUDA {dotted(builds[-1]['cuda'])}"


def _nvidia_build(facts: Facts) -> str:
    """The build of torch for the oldest of the NVIDIA GPUs; "" if none is known."""
    seen = [gpu.capability for gpu in facts.gpus if gpu.maker == "nvidia"]
    return build_for(min(facts.capabilities or seen, default=()), facts.driver_cuda)


def _right_build(facts: Facts, maker: str) -> str:
    """The build of torch for the GPUs of this maker, or any that suffices."""
    any_build = f"torch {dotted(_BOUNDS['torch'])} or later"
    if maker == "amd":
        return f"{any_build}, built for ROCm"
    return (maker == "nvidia" and _nvidia_build(facts)) or any_build


def system(facts: Facts) -> Verdict:
    """The verdict on the operating system, the C library and the processor.

    The requirements of torch's wheels matter only if torch cannot be imported.
    """
    found = f"{facts.system} {facts.machine}"
    if facts.system == "Windows":
        return warn(
            f"{found}: the library, recipes, formats and doctor work, runs do not",
            "use WSL 2 (Windows Subsystem for Linux) for everything else",
        )
    if facts.system != "Linux":
        if facts.torch_error and facts.machine != "arm64":
            return miss(found, "use Linux or an Apple-silicon Mac; torch has no builds for Intel Macs")
        return warn(f"{found}: narrowgauge was written and tested on Linux", "use Linux for runs that matter")
    found += f", glibc {dotted(facts.glibc)}" if facts.glibc else ", a C library other than glibc"
    if facts.torch_error and facts.machine not in ("x86_64", "aarch64"):
        return miss(found, "build torch from its source: it has wheels for x86_64 and aarch64")
    needed = facts.needed_glibc or _BOUNDS["glibc"]
    if facts.torch_error and (not facts.glibc or facts.glibc < needed):
        need = f"torch {facts.torch} needs" if facts.torch else "torch's wheels need"
        return miss(
            f"{found}; {need} glibc {dotted(needed)} or later",
            "use a newer Linux (RHEL 8, Debian 10, Ubuntu 20.04 or later), or a container of one (Apptainer, "
            "Docker)",
        )
    if facts.machine != "x86_64" or not facts.cpu:
        return ok(found)
    if "avx2" not in facts.cpu:
        return warn(
            f"{found}, no AVX2: torch is slow here, and a build for later processors ends in SIGILL",
            "choose a machine with AVX2, or in a virtual machine a CPU model that shows it (-cpu host)",
        )
    best = "AVX-512" if "avx512f" in facts.cpu else "AVX2"
    return ok(f"{found}, {best}" + (", AMX" if "amx_bf16" in facts.cpu else ""))


def python(facts: Facts) -> Verdict:
    """The verdict on the version of Python."""
    version, oldest, newest = facts.python, _BOUNDS["python"], _BOUNDS["newest_python"]
    if version[:2] < oldest:
        return miss(dotted(version), f"install Python {dotted(oldest)} or later")
    if facts.torch_error and version[:2] > newest:
        found = f"{dotted(version)}, for which torch may have no wheel yet"
        return warn(found, f"install Python {dotted(oldest)} to {dotted(newest)}")
    return ok(dotted(version))


def packages(facts: Facts) -> Verdict:
    """The verdict on the packages other than torch."""
    there, oldest = facts.packages, known.LIMITS["packages"]
    if missing := [name for name, version in there.items() if not version]:
        return miss(f"missing: {', '.join(missing)}", f"python -m pip install {' '.join(missing)}")
    old = [name for name, v in there.items() if v != "unknown" and known.release(v) < oldest[name]]
    if old:
        wanted = " ".join(f"'{name}>={dotted(oldest[name])}'" for name in old)
        found = ", ".join(f"{name} {there[name]}" for name in old)
        return miss(f"too old: {found}", f"python -m pip install {wanted}")
    return ok(", ".join(f"{name} {version}" for name, version in there.items()))


def torch(facts: Facts) -> Verdict:
    """The verdict on the version and the build of torch."""
    makers, error = facts.makers, facts.torch_error
    maker = max(makers, default="")
    build = _right_build(facts, maker)
    if not facts.torch and not is_absent(error):
        return miss(f"it does not import: {error}", fix_of(error))
    if not facts.torch:
        smaller = "python -m pip install torch; without a GPU the build for CPUs is smaller"
        return miss("not installed", f"{f'install {build}' if maker else smaller} {_WHERE}")
    library = f" {dotted(facts.library)}" if facts.build != "cpu" else ""
    found = f"{facts.torch}, built for {_NAMES.get(facts.build, 'CPUs')}{library}"
    if known.release(facts.torch) < _BOUNDS["torch"]:
        return miss(found, f"install {build}")
    if error:
        return miss(f"{found}; it does not import: {error}", fix_of(error))
    if makers and facts.build not in map(_BUILD_OF.get, makers):
        there = known.count(makers.count(maker), f"{_MAKERS[maker]} GPU")
        return miss(f"{found}; this machine has {there}", f"install {build} instead {_WHERE}")
    return ok(found)


def driver(facts: Facts) -> Verdict:
    """The verdict on the driver of the GPUs."""
    if not facts.makers:
        return ok("no GPU, no driver")
    newest, found = facts.driver_cuda, facts.driver or "of unknown version"
    if "nvidia" not in facts.makers:
        return ok(f"amdgpu {found}")
    if newest is None:
        return miss(
            f"NVIDIA {found}, and its library libcuda.so.1 does not load",
            "install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all)",
        )
    found = f"NVIDIA {found}, for CUDA up to {dotted(newest)}"
    of_13 = _BOUNDS["driver_13"]
    update = f"update the driver ({_BOUNDS['driver']} or later for CUDA 12, {of_13} for CUDA 13)"
    if newest < _BOUNDS["cuda"]:
        return miss(f"{found}; torch {dotted(_BOUNDS['torch'])} and later bring CUDA 12 or 13", update)
    if facts.build != "cuda" or newest >= facts.library:
        return ok(found)
    built = f"torch was built for CUDA {dotted(facts.library)}"
    fix = f"{update}, or install {_right_build(facts, 'nvidia')}"
    if newest[0] < facts.library[0]:
        return miss(f"{found}; {built}", fix)
    return warn(f"{found}; {built}: it runs, without what is newer than the driver", fix)


def gpus(facts: Facts) -> Verdict:
    """The verdict on the GPUs that torch sees, and whether it has code for them."""
    if not facts.gpus:
        return _no_gpu(facts)
    alike = Counter(f"{gpu.name}, {human_bytes(gpu.memory)}, {_kind(gpu)}" for gpu in facts.gpus)
    found = "; ".join(f"{number} x {name}" for name, number in alike.items())
    if without := [_kind(gpu) for gpu in facts.gpus if not _has_code(facts.architectures, gpu)]:
        fix = f"install a torch built for {without[0]} if there is one, or train on the CPU (--device cpu)"
        if facts.gpus[0].maker == "nvidia" and (build := _nvidia_build(facts)):
            fix = f"install {build}, which has code for {without[0]}"
        return miss(f"{found}; this torch has code for {', '.join(facts.architectures)} only", fix)
    if len(set(map(_kind, facts.gpus))) > 1:
        return warn(
            found,
            "choose GPUs of one kind with CUDA_VISIBLE_DEVICES: together they go at the slowest one's pace, "
            "and a recipe may be native on some and emulated on others",
        )
    return ok(found)


def _kind(gpu: Gpu) -> str:
    """The property that determines which code a GPU runs, in words."""
    return f"compute capability {dotted(gpu.capability)}" if gpu.maker == "nvidia" else gpu.architecture


def _has_code(architectures: tuple[str, ...], gpu: Gpu) -> bool:
    """Whether a build of torch for these architectures has code that the GPU can run."""
    if not architectures or gpu.maker == "amd":
        return not architectures or gpu.architecture in architectures
    for name in architectures:
        if found := re.fullmatch(r"(compute|sm)_(\d+)(\d)[af]*", name):  # sm_90a: for one generation only
            version = int(found[2]), int(found[3])
            is_alike = found[1] == "compute" or version[0] == gpu.capability[0]
            if is_alike and version <= gpu.capability:
                return True
    return False


def _no_gpu(facts: Facts) -> Verdict:
    """The verdict where torch sees no GPU."""
    if not facts.makers and "nvidia" in facts.on_bus:
        there = known.count(facts.on_bus.count("nvidia"), "NVIDIA GPU")
        return warn(
            f"{there} on the bus, and no device file for it here",
            "install NVIDIA's driver; start a container with the GPUs (docker run --gpus all), and a Slurm "
            "job (--gpus)",
        )
    if not facts.makers:
        return ok("none; training runs on the CPU")
    kinds = ", ".join(f"compute capability {dotted(one)}" for one in dict.fromkeys(facts.capabilities))
    there = f"{known.count(len(facts.makers), 'GPU')} in the machine{f' ({kinds})' if kinds else ''}"
    there += ", none that torch sees"
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = facts.environment.get(name)
        if value is not None and (not value.strip() or value.strip().startswith("-")):
            return warn(f"{there}: {name}={value!r} hides them", f"unset {name}, or name GPUs in it")
    if facts.torch_error or facts.build == "cpu":
        why = "it does not import" if facts.torch_error else "it is a build for CPUs"
        return miss(f"{there}: {why}", "fix torch first (see above)")
    said = f" ({facts.gpu_error})" if facts.gpu_error else ""
    return miss(
        f"{there}{said}",
        "fix torch and the driver first; if both are right, see that this user may open the device files "
        "(/dev/nvidia*, or /dev/kfd and /dev/dri: group render) and that nothing crashed (dmesg)",
    )


def recipes(facts: Facts) -> Verdict | None:
    """The recipes that are native on all GPUs, and those that a newer CUDA would make native.

    None without a torch that can be imported.
    """
    if not facts.torch_works:
        return None
    devices = [
        Device(
            maker=gpu.maker, capability=gpu.capability, architecture=gpu.architecture, library=facts.library
        )
        for gpu in facts.gpus
    ]
    devices = list(dict.fromkeys(devices)) or [Device(maker="cpu")]
    native = [name for name in recipe_names() if all(_is_native(name, device) for device in devices)]
    emulated = [name for name in recipe_names() if name not in native]
    found = f"native: {', '.join(native)}; emulated: {', '.join(emulated) or 'none'}"
    latest = [replace(device, library=(99, 0)) for device in devices]
    gained = [name for name in emulated if all(_is_native(name, device) for device in latest)]
    if not gained:
        return ok(found)
    device = next(d for d in devices if not _is_native(gained[0], d))
    reason = choose_backend(recipe(gained[0]), device).reason.partition(";")[0]
    fix = f"install a torch of a newer CUDA to run {', '.join(gained)} natively: {reason}"
    return warn(found, fix)


def _is_native(name: str, device: Device) -> bool:
    return choose_backend(recipe(name), device).name == "native"


def nccl(facts: Facts) -> Verdict | None:
    """The verdict on the library through which processes talk; None without a torch that can be imported."""
    if not facts.torch_works:
        return None
    gpus, built = facts.gpus, ", ".join(facts.backends) or "none"
    if not gpus:
        if "gloo" in facts.backends:
            return ok(f"not needed: processes on CPUs talk through gloo (built in: {built})")
        return warn("this torch cannot connect processes", "install a torch built with gloo")
    name = "RCCL" if gpus[0].maker == "amd" else "NCCL"
    if "nccl" not in facts.backends:
        status = miss if len(gpus) > 1 else warn
        return status(f"none (built in: {built})", f"install a torch built with {name}, or use one GPU only")
    found = f"{name} {dotted(facts.nccl)}"
    if name == "RCCL":
        return ok(f"{found}; FP8 sums between GPUs: not known of RCCL")
    needed, capability = _BOUNDS["nccl_fp8"], _BOUNDS["fp8_capability"]
    if min(gpu.capability for gpu in gpus) < capability:
        between = f"between these GPUs, which takes compute capability {dotted(capability)}"
        return ok(f"{found}; no FP8 sums {between}")
    if facts.nccl[:2] < needed:
        return warn(
            f"{found}; no FP8 sums",
            f"install a torch with NCCL {dotted(needed)} or later, to add FP8 gradients on the wire",
        )
    return ok(f"{found}, with FP8 sums between GPUs")


def peers(facts: Facts) -> Verdict | None:
    """The verdict on pairs of GPUs, if there are any."""
    gpus = facts.gpus
    pairs = list(combinations(range(len(gpus)), 2))
    if not pairs:
        return None
    links = f" over {', '.join(facts.links)}" if facts.links else ""
    apart = [(a, b) for a, b in pairs if b not in gpus[a].peers or a not in gpus[b].peers]
    if not apart:
        return ok(f"each GPU reaches the memory of each other{links}")
    found = f"{len(apart)} of {len(pairs)} pairs of GPUs, such as {apart[0][0]} and {apart[0][1]}"
    return warn(
        f"{found}, reach each other only through the host's memory{links}",
        "measure before you use several (narrowgauge scaling); consumer cards have no peer access, on others "
        "switch off PCIe ACS and the IOMMU",
    )


def jobs(facts: Facts) -> Verdict | None:
    """The verdict on other users of the GPUs, if there are GPUs."""
    if not facts.gpus:
        return None
    taken = []
    for index, gpu in enumerate(facts.gpus):
        if gpu.processes or (gpu.used or 0) > known.LIMITS["gpu"]["foreign"]:
            by = f" by process {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
            busy = f", {gpu.busy} % busy" if gpu.busy else ""
            taken.append(f"GPU {index}: {human_bytes(gpu.used or 0)} in use{by}{busy}")
    if taken:
        return warn(
            "; ".join(taken),
            "wait for them, stop them if they are yours, or choose other GPUs with CUDA_VISIBLE_DEVICES",
        )
    is_known = any(gpu.used is not None for gpu in facts.gpus)
    return ok("no other work on the GPUs" if is_known else "unknown: the driver does not report it")
