"""The verdict on recipes: which run natively on these GPUs. It imports torch, as recipes do."""

from dataclasses import replace

from narrowgauge.cluster.doctor.facts import Facts, Gpu, Verdict, ok, warn
from narrowgauge.devices import Device
from narrowgauge.recipes import choose_backend, recipe, recipe_names


def check_recipes(facts: Facts) -> Verdict:
    """The verdict, and what a newer CUDA would make native."""
    kinds = dict.fromkeys(_device(gpu, facts.software.library) for gpu in facts.hardware.gpus)
    devices = list(kinds) or [Device(maker="cpu")]
    native = [name for name in recipe_names() if all(_is_native(name, device) for device in devices)]
    emulated = [name for name in recipe_names() if name not in native]
    found = f"native: {', '.join(native)}; emulated: {', '.join(emulated) or 'none'}"
    latest = [replace(device, library=(99, 0)) for device in devices]
    gained = [name for name in emulated if all(_is_native(name, device) for device in latest)]
    if gained:
        device = next(d for d in devices if not _is_native(gained[0], d))
        reason = choose_backend(recipe(gained[0]), device).reason.partition(";")[0]
        fix = f"install a torch of a newer CUDA to run {', '.join(gained)} natively: {reason}"
        return warn(found, fix)
    return ok(found)


def _device(gpu: Gpu, library: tuple[int, int]) -> Device:
    """A GPU as recipes see it, with the library that drives it."""
    return Device(maker=gpu.maker, capability=gpu.capability, architecture=gpu.architecture, library=library)


def _is_native(name: str, device: Device) -> bool:
    return choose_backend(recipe(name), device).name == "native"
