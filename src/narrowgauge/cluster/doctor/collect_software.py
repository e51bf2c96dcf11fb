"""Reads which Python, torch and packages there are, without importing any of them."""

import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from narrowgauge.cluster.doctor.facts import LIMITS, Software, Version, release
from narrowgauge.cluster.doctor.torch_setup.ask_torch import TorchReport


def collect_software(torch: TorchReport) -> Software:
    """Python, torch by its own report, or by its files where it does not import, and the other packages."""
    folder = folder_of("torch")
    none = {"version": "", "cuda": "", "hip": ""}
    told: Mapping[str, Any] = torch.software or (_written(folder) if folder else none)
    is_known = bool(torch.software or told["version"])
    return Software(
        python=tuple(sys.version_info[:3]),
        torch=told["version"],
        error=torch.error,
        glibc=_glibc_of(folder) if folder else (),
        packages={name: _version(name) for name in LIMITS["packages"]},
        build="rocm" if told["hip"] else "cuda" if told["cuda"] else "cpu" if is_known else "",
        library=release(told["hip"] or told["cuda"] or "0.0"),
        architectures=tuple(told.get("architectures", ())),
        backends=tuple(told.get("backends", ())),
        nccl=tuple(told.get("nccl", ())),
    )


def folder_of(name: str) -> Path | None:
    """The folder of a package that would be imported; None: there is none."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # something refuses the name
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _written(folder: Path) -> dict[str, str]:
    """The versions of torch, CUDA and ROCm in the file `version.py` of torch's build; "" if absent."""
    try:
        text = (folder / "version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = {}
    for key, name in (("version", "__version__"), ("cuda", "cuda"), ("hip", "hip")):
        match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        found[key] = match[1] if match else ""
    return found


def _glibc_of(folder: Path) -> Version:
    """The glibc that the wheel of the torch in this folder was built for: its tag `manylinux_2_28`."""
    try:
        wheel = distribution("torch")
        if Path(str(wheel.locate_file("torch"))).resolve() != folder.resolve():
            return ()
        tags = re.findall(r"manylinux_(\d+)_(\d+)", wheel.read_text("WHEEL") or "")
    except PackageNotFoundError:
        return ()
    return min(((int(major), int(minor)) for major, minor in tags), default=())


def _version(name: str) -> str:
    """The version of a package that can be imported, "" if it is missing."""
    if folder_of(name) is None:
        return ""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
