"""Statistics of token files, computed once and cached.

To compute its digest, and its smallest and largest id, all of a file is read. That is seconds for gigabytes,
so the result is cached. An entry is valid as long as path, inode, size and both times of change are the same
(rsync, tar and cp -p keep one of them), and is computed again in any doubt; a cache that cannot be written
only costs time.
"""

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from narrowgauge.data.cache import Progress
from narrowgauge.data.token_files.detect import OpenFile
from narrowgauge.files import cache_directory, make_directory, sha256_of, write_whole

_CHUNK = 1 << 22  # tokens read together


@dataclass(frozen=True)
class TokenStatistics:
    """The sha256 of all files that belong together, and the range of their ids."""

    sha256: str
    smallest: int
    largest: int


def token_statistics(file: OpenFile, report: Progress) -> TokenStatistics:
    """Statistics of the file, from the cache if it has them; `report` is called as bytes are read."""
    entry = cache_directory() / "surveys" / f"{_name(file.files)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = TokenStatistics(**json.loads(entry.read_text(encoding="utf-8")))
        if [type(value) for value in asdict(known).values()] == [str, int, int]:
            return known
    smallest, largest, total = 0, 0, len(file.tokens)
    for start in range(0, total, _CHUNK):
        chunk = np.asarray(file.tokens[start : start + _CHUNK])
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
        report(
            f"look through {file.path.name}",
            (start + len(chunk)) * chunk.itemsize,
            total * chunk.itemsize,
            "",
        )
    digests = "\n".join(sha256_of(path, follow_links=True) for path in file.files)
    result = TokenStatistics(hashlib.sha256(digests.encode()).hexdigest(), smallest, largest)
    with contextlib.suppress(OSError):
        make_directory(entry.parent)
        write_whole(entry, json.dumps(asdict(result)))
    return result


def _name(files: tuple[Path, ...]) -> str:
    stats = []
    for path in files:
        s = path.stat()
        stats.append((str(path.resolve()), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:32]
