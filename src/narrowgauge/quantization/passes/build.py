"""The C of `passes.c`, compiled once for a machine: where there is a C compiler, and nowhere else.

The library lies in the cache (`files.cache_directory`), under a name made of the source, the compiler's
flags and the CPU, so that a home that several machines share holds one for each. It is kept only after
it has given the numbers of torch's operations (`in_c`). `NARROWGAUGE_KERNELS=0` does without it.

The flags leave every number as it is: no product and sum become one rounding (`-ffp-contract=off`), and
what may be ignored is errno and the flags of exceptions, which nobody reads.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from importlib import resources
from pathlib import Path

from narrowgauge.files import cache_directory, make_directory

_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_FOR_THIS_CPU = ("-march=native", "-mcpu=native", "")  # the first that the compiler knows
_SECONDS = 60


def compiler() -> list[str]:
    """The command of the C compiler: $CC, cc, gcc or clang; [] if there is none."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    return []


def library_path() -> Path:
    """The place in the cache of the library of this source, for this CPU and compiler."""
    parts = (source(), _FLAGS, compiler(), platform.system(), platform.machine(), _cpu())
    return cache_directory() / "passes" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.so"


def built(directory: Path) -> Path | None:
    """The library, compiled into a directory; None where that fails."""
    command = compiler()
    if not command:
        return None
    file, library = directory / "passes.c", directory / "passes.so"
    file.write_text(source(), encoding="utf-8")
    for own in _FOR_THIS_CPU:
        flags = [*_FLAGS, *filter(None, [own])]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [*command, *flags, str(file), "-o", str(library), "-lm"],
                check=True,
                timeout=_SECONDS,
                capture_output=True,
            )
            return library
    return None


def opened(path: Path) -> ctypes.CDLL | None:
    """The library at a path; None if it is missing, or cannot be loaded here."""
    with suppress(OSError):
        return ctypes.CDLL(str(path)) if path.is_file() else None
    return None


def keep(library: Path) -> None:
    """Move a library to its place in the cache, if that can be written; other processes may do the same."""
    place = library_path()
    with suppress(OSError):
        make_directory(place.parent)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(library.read_bytes())
        os.replace(file.name, place)


def source() -> str:
    """The C of this package."""
    return resources.files("narrowgauge.quantization.passes").joinpath("passes.c").read_text(encoding="utf-8")


def _cpu() -> str:
    """What tells this CPU's instructions from those of others."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
        return "\n".join(sorted(set(named)))
    return f"{platform.node()} {platform.processor()}"
