"""Chooses the code that runs a recipe on a device: the hardware's formats or emulation, and why.

A *scheme* is one of torch's scaled GEMMs: element formats, scale blocks, and the devices whose matrix units
support them (torch.nn.functional.scaled_mm; its conditions are in aten/src/ATen/native/cuda/ScaledBlas.cpp).
A recipe runs natively if each of its GEMMs has a scheme on the device, and is emulated as a whole otherwise,
so that one word describes the arithmetic of a run.

Formats without a scheme are emulated everywhere: torch does not multiply FP6 or fixed point, and MXFP4 only
if it was built with a separate library.

A wide recipe is native, except for bf16 on GPUs without matrix units for it (NVIDIA before Ampere, AMD before
CDNA): torch converts bf16 to fp32 there. fp16 is native on them.

The facts that decide it are a device's maker, its generation and its library version. The name of a GPU is
not among them: two GPUs of one generation have the same abilities, and next year's GPU has a new name.
`devices.toml` only maps today's GPUs to generations, for questions about a device elsewhere.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from narrowgauge.quantization import Cast, make_cast
from narrowgauge.quantization.keys import Consumer
from narrowgauge.quantization.passes.implementations import ROW_PLACES, Implementation, implementation_on
from narrowgauge.recipes.places import GEMMS, GROUPS, is_wide
from narrowgauge.recipes.recipe import Recipe
from narrowgauge.recipes.recipe_rules import ATTENTION_PRODUCTS
from narrowgauge.system.devices import Device, imagined
from narrowgauge.system.errors import UserError, ending_with, unknown
from narrowgauge.system.files import shipped_text

if TYPE_CHECKING:
    import torch

#: The CUDA version assumed for a device elsewhere: the one that torch's wheels are built for. CUDA 13 dropped
#: GPUs before Turing; the last wheels that support them are built for 12.6 (`doctor` names the releases).
CUDA_ELSEWHERE, CUDA_BEFORE_TURING = (13, 0), (12, 6)
_TURING = (7, 5)
# Words in a product's full name that its short name lacks: "NVIDIA GeForce RTX 4090".
_MAKERS = re.compile(r"nvidia|geforce|amd|instinct|radeon|[\s_-]")

BACKENDS = ("auto", "native", "emulated")
_NO_UNITS = "a CPU has no narrow matrix units"
#: The first compute capability with matrix units for bf16, and AMD's architectures without any.
BF16_SINCE = (8, 0)
WITHOUT_BF16 = ("gfx906",)

Block = tuple[int, int] | None
OCP, FNUZ = frozenset({"e4m3", "e5m2"}), frozenset({"e4m3fnuz", "e5m2fnuz"})
E4M3, E2M1 = frozenset({"e4m3"}), frozenset({"e2m1"})
ROW, ROW128, ROW32, ROW16 = (1, 0), (1, 128), (1, 32), (1, 16)
OF_TENSOR, OF_ROW = ((None, None),), ((ROW, ROW), (ROW, None))
IN_128 = (ROW128, ROW128), (ROW128, (128, 128))


@dataclass(frozen=True, slots=True)
class Scheme:
    """One of torch's scaled GEMMs, and the devices that have it.

    Attributes:
        words: Its name in messages.
        scale: The scales of its operands, as in `Cast.scale`.
        blocks: The blocks of its two operands, in either order.
        elements: The formats that its elements can have; E5M2 is never on both sides, and on neither in
            blocks (`check_deepseek_recipe` and `check_mxfp8_recipe` of ScaledBlas.cpp).
        since: The first compute capability that has it; None if no NVIDIA GPU has it.
        only: Whether compute capabilities after `since` lack it.
        cuda: The first version of CUDA that has it.
        amd: The AMD architectures that have it.
    """

    words: str
    scale: str
    blocks: tuple[tuple[Block, Block], ...]
    elements: frozenset[str]
    since: tuple[int, int] | None = None
    only: bool = False
    cuda: tuple[int, int] = (0, 0)
    amd: tuple[str, ...] = ()

    def is_of(self, a: Cast, b: Cast) -> bool:
        """Whether two operands use this GEMM."""
        elements = {a.element.name, b.element.name}
        return (
            a.scale == b.scale == self.scale
            and not (a.has_row_scales or b.has_row_scales)
            and ((a.block, b.block) in self.blocks or (b.block, a.block) in self.blocks)
            and elements <= self.elements
            and elements != {"e5m2"}
            and not (a.unsupported[Consumer.NATIVE] or b.unsupported[Consumer.NATIVE])
        )

    def needs(self, device: Device) -> str:
        """What a device lacks for this GEMM, as words; "" if nothing."""
        if device.maker == "amd" and device.architecture in self.amd:
            return ""
        if self.since is None or device.maker != "nvidia":
            return " or ".join(self.amd) or "an NVIDIA GPU"
        has_units = device.capability == self.since if self.only else device.capability >= self.since
        if not has_units:
            return f"compute capability {_dotted(self.since)}" + ("" if self.only else " or later")
        return "" if device.library >= self.cuda else f"CUDA {_dotted(self.cuda)} or later"


SCHEMES = (
    Scheme("FP8 with a scale per tensor", "fp32", OF_TENSOR, OCP, since=(8, 9), amd=("gfx950",)),
    Scheme("FP8 with a scale per row", "fp32", OF_ROW, OCP, since=(8, 9), amd=("gfx950",)),
    Scheme("FP8 (fnuz) with a scale per tensor", "fp32", OF_TENSOR, FNUZ, amd=("gfx942",)),
    Scheme("FP8 (fnuz) with a scale per row", "fp32", OF_ROW, FNUZ, amd=("gfx942",)),
    Scheme("FP8 in blocks of 128", "fp32", IN_128, E4M3, since=(9, 0), only=True, cuda=(12, 9)),
    Scheme("MXFP8", "e8m0", ((ROW32, ROW32),), E4M3, since=(10, 0), cuda=(12, 8)),
    Scheme("NVFP4", "e4m3", ((ROW16, ROW16), (ROW16, (16, 16))), E2M1, since=(10, 0), cuda=(12, 8)),
)


class Backend(NamedTuple):
    """The choice of a backend: `name` is "native" or "emulated", `reason` a clause."""

    name: str
    reason: str


def choose_backend(recipe: Recipe, device: Device, requested: str = "auto") -> Backend:
    """Decide how a recipe runs on a device.

    Raises:
        UserError: The requested backend is unknown, or native where the device lacks the formats.
    """
    if requested not in BACKENDS:
        raise unknown("backend", requested, BACKENDS)
    gemms = products_on(recipe, device)
    schemes = list(dict.fromkeys(gemm.scheme for gemm in gemms if gemm.scheme))
    obstacle = next((gemm.obstacle for gemm in gemms if gemm.obstacle), "")
    if schemes and not obstacle and recipe.compute != "bf16":
        obstacle = f"native GEMMs return bf16, and this recipe computes in {recipe.compute}"
    products = f"{recipe.compute} GEMMs"
    if without_units := _lacks_units(recipe.compute, device):
        products = f"{products}, which are fp32 GEMMs here" if recipe.is_narrow else "fp32 GEMMs"
    if requested == "native" and obstacle:
        raise UserError(
            f"recipe {recipe.name!r} cannot run natively here: {obstacle}; "
            f"use --backend emulated (the same numbers, computed in {products.removesuffix(' GEMMs')})"
        )
    if not recipe.is_narrow and not obstacle:
        return Backend("native", f"torch multiplies {recipe.compute} itself")
    if requested == "emulated" and not obstacle:
        obstacle = "asked for"
    if obstacle:
        instead = "; recipe fp16 is native" if without_units and not recipe.is_narrow else ""
        return Backend("emulated", f"{obstacle}; the same numbers in {products}{instead}")
    return Backend("native", f"{device} multiplies {' and '.join(schemes)}")


def _lacks_units(compute: str, device: Device) -> str:
    """Why a GPU does not natively multiply a wide format, as a clause; "" if it does."""
    if compute == "bf16" and device.maker == "nvidia" and device.capability < BF16_SINCE:
        return f"bf16 takes compute capability {_dotted(BF16_SINCE)} or later; {_described(device)}"
    if compute == "bf16" and device.maker == "amd" and device.architecture in WITHOUT_BF16:
        return f"bf16 takes gfx908 or later; {_described(device)}"
    return ""


class Product(NamedTuple):
    """A GEMM of a recipe on a device.

    Attributes:
        gemm: "fprop", "dgrad" or "wgrad"; for attention a key of `ATTENTION_PRODUCTS`.
        places: The places of its two operands.
        operands: The casts of its two operands.
        scheme: The name of the device's scheme for it; "" for a plain GEMM.
        obstacle: Why the device cannot multiply these values, as a clause; "" if it can.
        made_by: The code that makes each operand; None in attention, where the actual shapes decide.
    """

    gemm: str
    places: tuple[str, str]
    operands: tuple[Cast, Cast]
    scheme: str
    obstacle: str
    made_by: tuple[Implementation, Implementation] | None = None


def products_on(recipe: Recipe, device: Device) -> list[Product]:
    """Every GEMM that a recipe has in any layer at any time, and whether a device multiplies it."""
    found = []
    for gemm in GEMMS:
        found += [_product(gemm, *pair, device, recipe.compute) for pair in _pairs(recipe, *GROUPS[gemm])]
    for product, places in ATTENTION_PRODUCTS.items() if recipe.narrows_attention else ():
        for a, b in _pairs(recipe, *places):  # torch has no kernel for narrow ones
            names = f"{product} of {a.name} and {b.name}"
            obstacle = f"attention multiplies {names}, which torch does on no device"
            if is_wide(a, recipe.compute) and is_wide(b, recipe.compute):
                obstacle = ""
            elif device.maker == "cpu":
                obstacle = _NO_UNITS
            found.append(Product(product, places, (a, b), "", obstacle))
    return found


def _product(gemm: str, a: Cast, b: Cast, device: Device, compute: str) -> Product:
    schemes = [scheme for scheme in SCHEMES if scheme.is_of(a, b)]
    found = next((scheme.words for scheme in schemes if not scheme.needs(device)), "")
    obstacle = ""
    if a == b and not a.is_scaled and not a.function:
        obstacle = _lacks_units(a.name, device)
    elif device.maker == "cpu":
        obstacle = _NO_UNITS
    elif not schemes:
        names = a.name if a.name == b.name else f"{a.name} by {b.name}"
        obstacle = f"{gemm} multiplies {names}, which torch does on no device"
    elif not found:
        lacks = f"{schemes[0].words}, which takes {schemes[0].needs(device)}"
        obstacle = f"{gemm} needs {lacks}; {_described(device)}"
    first, second = GROUPS[gemm]
    x, w = (
        implementation_on(cast, device, compute == "bf16" and place in ROW_PLACES)
        for place, cast in ((first, a), (second, b))
    )
    return Product(gemm, (first, second), (a, b), found, obstacle, (x, w))


def _described(device: Device) -> str:
    with_library = f" with CUDA {_dotted(device.library)}" if device.maker == "nvidia" else ""
    return f"this is {device}{with_library}"


def _pairs(recipe: Recipe, first: str, second: str) -> Iterable[tuple[Cast, Cast]]:
    """Every pair of casts that the operands of a matmul can have in any layer at any time."""
    wide = make_cast(recipe.compute)
    pairs = {(recipe.places.get(first) or wide, recipe.places.get(second) or wide): None}
    for rule in recipe.rules:
        for a, b in list(pairs):
            pairs[rule.places.get(first, a) or wide, rule.places.get(second, b) or wide] = None
    return pairs


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def device_facts(device: torch.device) -> Device:
    """The facts of a torch device, or of the GPU that it simulates (`devices.imagine`)."""
    if (facts := imagined(device)) is not None:
        return facts
    if device.type != "cuda":
        return Device(maker=device.type)
    import torch  # here, so that a device elsewhere can be described without it

    from narrowgauge.kernels.dispatch import can_compile

    library = _version(torch.version.hip or torch.version.cuda or "0.0")
    build: dict[str, Any] = {"library": library, "compiles": can_compile()}
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return Device(maker="amd", architecture=name.partition(":")[0], **build)
    return Device(maker="nvidia", capability=torch.cuda.get_device_capability(device), **build)


def named_device(name: str) -> Device:
    """The facts of a device that need not be present: `sm_89`, `gfx942`, a product such as `rtx4090` (also
    its ending, `4090`, if no other product has it), or `cpu`.

    Raises:
        UserError: The device is unknown; the message suggests the nearest names.
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
