"""Files that an attacker makes: live pickles, headers that lie, and manifests that agree with anything."""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.trainer.checkpoint.store.manifest import FileEntry, Manifest


class Bomb:
    """Unpickling this makes a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    """A file with any header, whatever its data are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY: dict[str, Any] = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
SOUND = safetensors({"a": ENTRY}, b"1234")
#: Files that are refused whatever is expected in them; then those that have another tensor than SOUND.
MALFORMED = {
    "huge header": struct.pack("<Q", 2**62) + b"{}",
    "a header of 4 GB": struct.pack("<Q", 4 << 30) + b"{}",
    "header beyond the file": struct.pack("<Q", 10_000) + b"{}",
    "overlap": safetensors({"a": ENTRY, "b": ENTRY | {"data_offsets": [2, 6]}}, b"123456"),
    "beyond the file": safetensors({"a": ENTRY | {"shape": [2**40], "data_offsets": [0, 2**40]}}, b"1234"),
    "shape and offsets disagree": safetensors({"a": ENTRY | {"shape": [2**40]}}, b"1234"),
    "before the file": safetensors({"a": ENTRY | {"data_offsets": [-1, 3]}}, b"1234"),
    "ends before it begins": safetensors({"a": ENTRY | {"data_offsets": [4, 0]}}, b"1234"),
    "a hole": safetensors({"a": ENTRY, "b": ENTRY | {"data_offsets": [6, 10]}}, b"0123456789"),
    "unknown dtype": safetensors({"a": ENTRY | {"dtype": "PICKLE"}}, b"1234"),
    "four bytes": b"1234",
    "seven bytes": b"1234567",
    "header is not JSON": safetensors(b"\x80\x04cos\nsystem\n"),
}
OTHER = {
    "another dtype": safetensors({"a": ENTRY | {"dtype": "I8"}}, b"1234"),
    "another shape": safetensors({"a": ENTRY | {"shape": [2, 2]}}, b"1234"),
    "another key": safetensors({"b": ENTRY}, b"1234"),
}


def seal(step: Path, run_id: str = "run") -> Path:
    """Give a directory step-N a manifest that agrees with whatever is in it."""
    data = {path.name: path.read_bytes() for path in step.iterdir() if path.name != "manifest.json"}
    entries = {name: FileEntry(len(d), hashlib.sha256(d).hexdigest()) for name, d in data.items()}
    manifest = Manifest(int(step.name.removeprefix("step-")), run_id, entries)
    (step / "manifest.json").write_text(manifest.to_json())
    return step


def forge(step: Path, files: Mapping[str, bytes], run_id: str = "run") -> Path:
    """Put files into a directory step-N, and seal it."""
    step.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (step / name).write_bytes(data)
    return seal(step, run_id)
