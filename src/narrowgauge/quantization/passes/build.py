"""Compiles the C of this folder (`SOURCES`) once per machine into one library, if there is a C compiler.

The library is kept in the cache (`files.cache_directory`) under a name made of the source, the compiler flags
and the CPU, so that a home directory shared by several machines holds one for each. It is kept only after its
results have matched torch's (`in_c`). `NARROWGAUGE_KERNELS=0` disables it.

A library is code, and several users may share a cache. So each user has a separate folder there,
`passes-UID`. Only bytes that were read once are loaded, from a file and folder that only this user can write
to and whose name contains their digest. Anything else is recompiled.

The flags keep every value as it is: multiply and add are not fused into one rounding (`-ffp-contract=off`).
The compiler may ignore only errno and floating-point exception flags, which no code reads.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from threading import Timer
from typing import Any

from narrowgauge.system.files import cache_directory, make_directory, open_regular
from narrowgauge.system.operating_system import is_private, user_id
from narrowgauge.system.processes import output_of

SOURCES = ("bf16.h", "narrow.h", "scales.h", "narrow.c", "attention.c", "layers.c")
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
#: Uses the first that the compiler knows; by default GCC leaves half of AVX-512's width unused.
_FOR_THIS_CPU = ("-march=native -mprefer-vector-width=512", "-march=native", "-mcpu=native", "")
_SECONDS = 60
_QUIET_SECONDS = 1.0  # a compilation that takes longer is announced


def compiler() -> list[str]:
    """The command of the C compiler: $CC, cc, gcc or clang; [] if there is none."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    return []


def kept() -> Iterator[bytes]:
    """The cached libraries for these sources, CPU and compiler that no other user can have written.

    There may be several if machines with different C libraries share a home directory.

    Warns:
        UserWarning: Other users can write to the folder, so nothing in it is read.
    """
    folder, key = _folder(), _key()
    with suppress(OSError):
        if not _is_private(folder):
            warnings.warn(
                f"{folder} is not a directory that only this user can write to, so the compiled passes in it "
                "are not loaded, and each process compiles them: remove it, or `chmod 700` it if it is yours",
                stacklevel=2,
            )
            return
        for path in sorted(folder.glob(f"{key}-*.so")):
            with suppress(OSError), open_regular(path) as file:
                content = file.read()
                if is_private(os.fstat(file.fileno())) and path.name == _name_of(content, key):
                    yield content


def compiled(library: Path) -> bool:
    """Whether the sources could be compiled, beside the library; announced on a terminal if it takes long."""
    command = compiler()
    if not command:
        return False
    for name, text in sources().items():
        library.with_name(name).write_text(text, encoding="utf-8")
    files = [str(library.with_name(name)) for name in SOURCES if name.endswith(".c")]
    line = f"narrowgauge: {command[0]} compiles the CPU kernels, once on this machine ..."
    timer = Timer(_QUIET_SECONDS, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        flags = ([*_FLAGS, *own.split(), *files, "-o", str(library), "-lm"] for own in _FOR_THIS_CPU)
        return any(output_of([*command, *some], _SECONDS).code == 0 for some in flags)
    finally:
        timer.cancel()


def keep(content: bytes) -> None:
    """Put a library into the cache if that is safe; other processes may do the same concurrently."""
    folder = _folder()
    with suppress(OSError):
        make_directory(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not _is_private(folder):
            return
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:  # of mode 600
            file.write(content)
        try:
            os.replace(file.name, folder / _name_of(content, _key()))
        finally:
            Path(file.name).unlink(missing_ok=True)


def sources() -> dict[str, str]:
    """The package's C sources, by file name."""
    folder = resources.files("narrowgauge.quantization.passes")
    return {name: folder.joinpath(name).read_text(encoding="utf-8") for name in SOURCES}


@cache
def struct(name: str) -> Any:
    """The class of a struct of the C sources: its fields stand there only."""
    text = re.sub(r"/\*.*?\*/|const ", "", "".join(sources().values()), flags=re.DOTALL)
    (body,) = re.findall(rf"typedef struct {{([^}}]*)}} {name};", text)
    fields = []
    for declaration in body.split(";")[:-1]:
        kind, names = declaration.split(maxsplit=1)
        for pointer, field, size in re.findall(r"(\*?)(\w+)(?:\[(\d+)\])?", names):
            number = getattr(ctypes, "c_" + kind.removesuffix("_t"), None)  # float: c_float, int32_t: c_int32
            one = ctypes.c_void_p if pointer else number or struct(kind)
            fields.append((field, one * int(size) if size else one))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _cpu() -> str:
    """A description of this CPU's instruction set."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
        return "\n".join(sorted(set(named)))
    return f"{platform.node()} {platform.processor()}"


def _folder() -> Path:
    """The folder of this user's libraries."""
    return cache_directory() / f"passes-{user_id()}"


def _is_private(folder: Path) -> bool:
    """Whether a folder exists, is not a symbolic link, and only this user can write to it."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and is_private(status)


def _key() -> str:
    """The first half of a library's name: sources, compiler and CPU."""
    parts = (sources(), _FLAGS, _FOR_THIS_CPU, compiler(), platform.system(), platform.machine(), _cpu())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _name_of(content: bytes, key: str) -> str:
    """The name of a library; its second half is the digest of its key and bytes."""
    return f"{key}-{hashlib.sha256(key.encode() + content).hexdigest()}.so"
