"""What is in a token file, found once and remembered.

Its digest, and its smallest and largest id, take one reading of the whole file. That is seconds for
gigabytes, so the answer is kept in the cache. It holds as long as path, size and time of change are the same,
and is worked out again in any doubt; a cache that cannot be written costs time only.
"""

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from narrowgauge.data.preparation.corpus_builder import Progress
from narrowgauge.data.preparation.prepare import cache_directory
from narrowgauge.data.preparation.publish import whole_file
from narrowgauge.data.token_files.detect import OpenFile
from narrowgauge.data.token_files.token_file import file_sha256

_CHUNK = 1 << 22  # tokens looked at together


@dataclass(frozen=True)
class TokenStatistics:
    """The sha256 of all files that belong together, and the range of their ids."""

    sha256: str
    smallest: int
    largest: int


def token_statistics(file: OpenFile, report: Progress) -> TokenStatistics:
    """What is in the file, from the cache where it is known; `report` is told of bytes."""
    note = cache_directory() / "surveys" / f"{_name(file.files)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = TokenStatistics(**json.loads(note.read_text(encoding="utf-8")))
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
    digests = "\n".join(map(file_sha256, file.files))
    result = TokenStatistics(hashlib.sha256(digests.encode()).hexdigest(), smallest, largest)
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(note) as out:
            out.write(json.dumps(asdict(result)).encode("utf-8"))
    return result


def _name(files: tuple[Path, ...]) -> str:
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:32]
