"""Statistics of token files, computed once and cached.

The digest and the smallest and largest id require reading the whole file. That takes seconds for gigabytes,
so the result is cached. An entry is valid while path, inode, size and both modification times are unchanged
(rsync, tar and cp -p preserve only one of them), and is recomputed in any doubt. If the cache cannot be
written, only time is lost.
"""

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from narrowgauge.system.files import cache_directory, sha256_of, write_cached
from narrowgauge.trainer.data.cache import Progress
from narrowgauge.trainer.data.token_files.token_file import OpenFile

_CHUNK = 1 << 22  # tokens read together


@dataclass(frozen=True)
class TokenStatistics:
    """The sha256 of the files that belong together, and the range of their ids."""

    sha256: str
    smallest: int
    largest: int


def token_statistics(file: OpenFile, report: Progress) -> TokenStatistics:
    """Statistics of the file, from the cache if possible; `report` is called as bytes are read."""
    files = (file.path, *file.beside)
    entry = cache_directory() / "surveys" / f"{_name(files)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = TokenStatistics(**json.loads(entry.read_text(encoding="utf-8")))
        if [type(value) for value in asdict(known).values()] == [str, int, int]:
            return known
    smallest, largest, total = 0, 0, len(file.tokens)
    for start in range(0, total, _CHUNK):
        chunk = np.asarray(file.tokens[start : start + _CHUNK])
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
        size = chunk.itemsize
        report(f"scan {file.path.name}", (start + len(chunk)) * size, total * size, "")
    digests = "\n".join(sha256_of(path, follow_links=True) for path in files)
    result = TokenStatistics(hashlib.sha256(digests.encode()).hexdigest(), smallest, largest)
    write_cached(entry, asdict(result))
    return result


def _name(files: tuple[Path, ...]) -> str:
    stats = []
    for path in files:
        s = path.stat()
        stats.append((str(path.resolve()), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:32]
