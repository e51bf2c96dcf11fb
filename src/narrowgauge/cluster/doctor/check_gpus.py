"""Can these GPUs be used, and by how much? Verdicts on GPUs, recipes, NCCL, peers and the work of others.

Machine code for sm_XY runs on a GPU of capability X.Z with Z >= Y; PTX, called compute_XY, on every later one
("CUDA C++ Programming Guide", binary and PTX compatibility).
NCCL adds FP8 from 2.24 on, on GPUs of capability 9.0 and later (release notes of NCCL 2.24).
"""

from dataclasses import replace

from narrowgauge.cluster.doctor.facts import Facts, Gpu, Item, Software, dotted, miss, ok, warn
from narrowgauge.recipes import choose_backend, recipe, recipe_names
from narrowgauge.recipes.capability import Device
from narrowgauge.units import human_bytes

_NCCL_FP8, _FP8_SUMS = (2, 24), (9, 0)
_FOREIGN = 1 << 30  # bytes in use on a GPU that are somebody's work; a display and the driver take less


def check_gpus(facts: Facts) -> list[Item]:
    """The items of this file; those on several GPUs, or on any, only where there are such."""
    items = [_gpus(facts), _recipes(facts), _nccl(facts)]
    return items + [item for judge in (_peers, _jobs) if (item := judge(facts))]


def _gpus(facts: Facts) -> Item:
    hardware, software = facts.hardware, facts.software
    gpus = hardware.gpus
    if not gpus:
        return _no_gpu(facts)
    names = {f"{gpu.name}, {human_bytes(gpu.memory)}, {_kind(gpu)}": 0 for gpu in gpus}
    for gpu in gpus:
        names[f"{gpu.name}, {human_bytes(gpu.memory)}, {_kind(gpu)}"] += 1
    found = "; ".join(f"{number} x {name}" for name, number in names.items())
    without = [gpu for gpu in gpus if not _has_code(software, gpu)]
    if without:
        return miss(
            "gpus",
            f"{found}; this torch has code for {', '.join(software.architectures)} only",
            f"install a torch built for {_kind(without[0])}",
        )
    if len({_kind(gpu) for gpu in gpus}) > 1:
        return warn(
            "gpus",
            found,
            "choose GPUs of one kind with CUDA_VISIBLE_DEVICES: together they go at the slowest one's pace, "
            "and a recipe may be native on some and emulated on others",
        )
    return ok("gpus", found)


def _no_gpu(facts: Facts) -> Item:
    hardware = facts.hardware
    if not hardware.makers and "nvidia" in hardware.on_bus:
        there = _count(hardware.on_bus.count("nvidia"), "NVIDIA GPU")
        return warn(
            "gpus",
            f"{there} on the bus, and no device file for it here",
            "install NVIDIA's driver; start a container with the GPUs (docker run --gpus all), and a Slurm "
            "job (--gpus)",
        )
    if not hardware.makers:
        return ok("gpus", "none; training runs on the CPU")
    there = f"{_count(len(hardware.makers), 'GPU')} in the machine, none that torch sees"
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = facts.environment.get(name)
        if value is not None and (not value.strip() or value.strip().startswith("-")):
            return warn("gpus", f"{there}: {name}={value!r} hides them", f"unset {name}, or name GPUs in it")
    if facts.software.build == "cpu":
        return miss("gpus", f"{there}: it is a build for CPUs", "fix torch first (see above)")
    said = f" ({hardware.error})" if hardware.error else ""
    return miss(
        "gpus",
        f"{there}{said}",
        "fix torch and the driver first; if both are right, see that this user may open the device files "
        "(/dev/nvidia*, or /dev/kfd and /dev/dri: group render) and that nothing crashed (dmesg)",
    )


def _has_code(software: Software, gpu: Gpu) -> bool:
    """Whether the build of torch can run on the GPU at all."""
    if not software.architectures:
        return True
    if gpu.maker == "amd":
        return gpu.architecture in software.architectures
    for name in software.architectures:
        kind, _, digits = name.rpartition("_")
        number = digits.rstrip("af")  # sm_90a, sm_100f: for one generation only
        if not number.isdigit():
            continue
        major, minor = int(number[:-1]), int(number[-1])
        if kind == "compute" and (major, minor) <= gpu.capability:
            return True
        if kind == "sm" and major == gpu.capability[0] and minor <= gpu.capability[1]:
            return True
    return False


def _devices(facts: Facts) -> list[Device]:
    """The GPUs as recipes see them, each kind once; a CPU where there are none."""
    library = facts.software.library
    kinds = (
        Device(maker=g.maker, capability=g.capability, architecture=g.architecture, library=library)
        for g in facts.hardware.gpus
    )
    return list(dict.fromkeys(kinds)) or [Device(maker="cpu")]


def _recipes(facts: Facts) -> Item:
    devices = _devices(facts)
    native = [name for name in recipe_names() if all(_is_native(name, device) for device in devices)]
    emulated = [name for name in recipe_names() if name not in native]
    found = f"native: {', '.join(native)}; emulated: {', '.join(emulated) or 'none'}"
    latest = [replace(device, library=(99, 0)) for device in devices]
    gained = [name for name in emulated if all(_is_native(name, device) for device in latest)]
    if gained:
        device = next(d for d in devices if not _is_native(gained[0], d))
        reason = choose_backend(recipe(gained[0]), device).reason.partition(";")[0]
        return warn(
            "recipes",
            found,
            f"install a torch of a newer CUDA to run {', '.join(gained)} natively: {reason}",
        )
    return ok("recipes", found)


def _is_native(name: str, device: Device) -> bool:
    return choose_backend(recipe(name), device).name == "native"


def _nccl(facts: Facts) -> Item:
    software, gpus = facts.software, facts.hardware.gpus
    built = ", ".join(software.backends) or "none"
    if not gpus:
        if "gloo" in software.backends:
            return ok("nccl", f"not needed: processes on CPUs talk through gloo (built in: {built})")
        return warn("nccl", "this torch cannot connect processes", "install a torch built with gloo")
    name = "RCCL" if gpus[0].maker == "amd" else "NCCL"
    if "nccl" not in software.backends:
        status = miss if len(gpus) > 1 else warn
        return status(
            "nccl", f"none (built in: {built})", f"install a torch built with {name}, or use one GPU only"
        )
    found = f"{name} {dotted(software.nccl)}"
    if name == "RCCL":
        return ok("nccl", f"{found}; FP8 sums between GPUs: not known of RCCL")
    if min(gpu.capability for gpu in gpus) < _FP8_SUMS:
        return ok("nccl", f"{found}; no FP8 sums between these GPUs, which takes compute capability 9.0")
    if software.nccl[:2] < _NCCL_FP8:
        return warn(
            "nccl",
            f"{found}; no FP8 sums",
            f"install a torch with NCCL {dotted(_NCCL_FP8)} or later, to add FP8 gradients on the wire",
        )
    return ok("nccl", f"{found}, with FP8 sums between GPUs")


def _peers(facts: Facts) -> Item | None:
    gpus = facts.hardware.gpus
    if len(gpus) < 2:
        return None
    kinds = sorted({kind for _, _, kind in facts.hardware.links})
    links = f" over {', '.join(kinds)}" if kinds else ""
    pairs = [(a, b) for a in range(len(gpus)) for b in range(a + 1, len(gpus))]
    apart = [(a, b) for a, b in pairs if b not in gpus[a].peers or a not in gpus[b].peers]
    if not apart:
        return ok("peers", f"each GPU reaches the memory of each other{links}")
    found = f"{len(apart)} of {len(pairs)} pairs of GPUs, such as {apart[0][0]} and {apart[0][1]}"
    return warn(
        "peers",
        f"{found}, reach each other only through the host's memory{links}",
        "measure before you use several (narrowgauge scaling); consumer cards have no peer access, on others "
        "switch off PCIe ACS and the IOMMU",
    )


def _jobs(facts: Facts) -> Item | None:
    gpus = facts.hardware.gpus
    if not gpus:
        return None
    taken = []
    for index, gpu in enumerate(gpus):
        if gpu.processes or (gpu.used or 0) > _FOREIGN:
            who = ", ".join(str(pid) for pid, _ in gpu.processes)
            by = f" by process {who}" if who else ""
            busy = f", {gpu.busy} % busy" if gpu.busy else ""
            taken.append(f"GPU {index}: {human_bytes(gpu.used or 0)} in use{by}{busy}")
    if taken:
        return warn(
            "gpu-jobs",
            "; ".join(taken),
            "wait for them, stop them if they are yours, or choose other GPUs with CUDA_VISIBLE_DEVICES",
        )
    if all(gpu.used is None for gpu in gpus):
        return ok("gpu-jobs", "not known: the driver does not tell")
    return ok("gpu-jobs", "no other work on the GPUs")


def _kind(gpu: Gpu) -> str:
    return gpu.architecture if gpu.maker == "amd" else f"compute capability {dotted(gpu.capability)}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"
