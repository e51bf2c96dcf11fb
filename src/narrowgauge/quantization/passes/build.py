"""The C of `passes.c`, compiled once for a machine: where there is a C compiler, and nowhere else.

The library lies in the cache (`files.cache_directory`), under a name made of the source, the compiler's
flags and the CPU, so that a home that several machines share holds one for each. It is kept only after
it has given the numbers of torch's operations (`in_c`). `NARROWGAUGE_KERNELS=0` does without it.

A library is code, and several users may share a cache. So each user has a folder there, `passes-UID`, and
what is loaded are bytes that were read once, from a file that only this user can write, in a folder that only
this user can write, and whose name holds their digest. Anything else is compiled anew.

The flags leave every number as it is: no product and sum become one rounding (`-ffp-contract=off`), and
what may be ignored is errno and the flags of exceptions, which nobody reads.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import resources
from pathlib import Path

from narrowgauge.files import cache_directory, make_directory, open_regular
from narrowgauge.operating_system import is_private, user_id
from narrowgauge.processes import output_of

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


def kept() -> Iterator[bytes]:
    """The libraries in the cache for this source, CPU and compiler that no other user can have written.

    There may be several, where machines with other C libraries share a home.

    Warns:
        UserWarning: Other users can write to the folder, so nothing in it is read.
    """
    folder, key = _folder(), _key()
    with suppress(OSError):
        if not _is_private(folder):
            warnings.warn(
                f"{folder} is no directory that only this user can write to, so the compiled passes in it "
                "are not loaded, and each process compiles them: remove it, or `chmod 700` it if it is yours",
                stacklevel=2,
            )
            return
        for path in sorted(folder.glob(f"{key}-*.so")):
            with suppress(OSError), open_regular(path) as file:
                content = file.read()
                if is_private(os.fstat(file.fileno())) and path.name == _name_of(content, key):
                    yield content


def built(directory: Path) -> Path | None:
    """The library, compiled into a directory; None where that fails."""
    command = compiler()
    if not command:
        return None
    file, library = directory / "passes.c", directory / "passes.so"
    file.write_text(source(), encoding="utf-8")
    for own in _FOR_THIS_CPU:
        flags = [*_FLAGS, *filter(None, [own])]
        if output_of([*command, *flags, str(file), "-o", str(library), "-lm"], _SECONDS).code == 0:
            return library
    return None


def opened(path: Path) -> ctypes.CDLL | None:
    """The library at a path; None if it cannot be loaded here."""
    with suppress(OSError):
        return ctypes.CDLL(str(path))
    return None


def keep(content: bytes) -> None:
    """Put a library into the cache, if that can be done safely; other processes may do the same."""
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


def _folder() -> Path:
    """The folder of this user's libraries."""
    return cache_directory() / f"passes-{user_id()}"


def _is_private(folder: Path) -> bool:
    """Whether nobody else can write to a folder that is there; a symbolic link is none."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and is_private(status)


def _key() -> str:
    """The first half of a library's name: source, compiler and CPU."""
    parts = (source(), _FLAGS, compiler(), platform.system(), platform.machine(), _cpu())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _name_of(content: bytes, key: str) -> str:
    """The name of a library, whose second half is the digest of its key and its bytes."""
    return f"{key}-{hashlib.sha256(key.encode() + content).hexdigest()}.so"
