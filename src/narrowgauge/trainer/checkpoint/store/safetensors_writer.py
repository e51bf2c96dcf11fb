"""Writes one safetensors file: hashed and synced in one pass over the bytes.

    8 bytes     length N of the header, little-endian
    N bytes     JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...},
                padded with blanks to a multiple of 8
    the rest    the tensors' bytes, row by row, without gaps; wider dtypes first, so that all are aligned

(Layout: the safetensors format.) The library's own writer would need a second pass over the file for the
digest. Here one thread writes a chunk while another hashes it; both release the interpreter's lock, so that a
save in the background does not slow the training loop.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread

import torch

from narrowgauge.system.files import crash_point, naming
from narrowgauge.trainer.checkpoint.store.manifest import FileEntry

CHUNK = 8 << 20  # bytes written and hashed at a time
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"C64": torch.complex64, "BOOL": torch.bool},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write and sync a file that must not exist yet; returns its size and digest.

    Tensors may be on any device and have any strides. Those that are not contiguous on the CPU are copied,
    one at a time. The strings of `metadata` go into the header. After an `OSError` the caller removes the
    partial file.
    """
    crash_point(f"write:{path.name}")
    order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))
    size = 0
    with naming(path), path.open("xb") as file, _hashing() as (hash_chunk, digest):
        for chunk in _chunks(_header(tensors, order, metadata), (tensors[key] for key in order)):
            hash_chunk(chunk)
            file.write(chunk)
            size += len(chunk)
        file.flush()
        crash_point(f"written:{path.name}")
        os.fsync(file.fileno())
    crash_point(f"synced:{path.name}")
    return FileEntry(size, digest.hexdigest())


@contextmanager
def _hashing() -> Iterator[tuple[Callable[[memoryview], None], "hashlib._Hash"]]:
    """Start a thread that hashes chunks in order; yields the function that feeds it, and the digest."""
    digest = hashlib.sha256()
    chunks: Queue[memoryview | None] = Queue(2)  # few, so that the disk and the hash wait for each other

    def work() -> None:
        while (chunk := chunks.get()) is not None:
            digest.update(chunk)

    # Not an executor: it accepts no work while the process exits, and a save may outlast the program.
    thread = Thread(target=work)
    thread.start()
    try:
        yield chunks.put, digest
    finally:
        chunks.put(None)
        thread.join()


def _header(
    tensors: Mapping[str, torch.Tensor], order: list[str], metadata: Mapping[str, str] | None
) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in order:
        tensor = tensors[key]
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        entries[key] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(header: bytes, tensors: Iterator[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        view = memoryview(flat.view(torch.uint8).numpy().data)
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]
