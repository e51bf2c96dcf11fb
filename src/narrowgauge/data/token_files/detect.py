"""Which layout is a token file in? Its content says so, never its name.

| layout         | begins with                | the id between documents  | vocabulary              |
|----------------|----------------------------|---------------------------|-------------------------|
| llm.c          | int32 20240520 or 20240801 | stands before a document  | GPT-2's, or Llama 3's   |
| Megatron       | its .idx with `MMIDIDX`    | stands behind, if at all  | not stated              |
| llmq           | `BIN.TOK\\n`                | stands behind             | not stated in full      |
| bare (nanoGPT) | a token: uint16, no header | stands behind             | not stated              |

modded-nanogpt's files are llm.c's. A file is bare if it has an even number of bytes and is none of the
others, nor text, nor of a kind that is known by its first bytes (compressed, parquet, pickled ...), and if
its numbers repeat themselves as those of a text do: fewer than half of them are different.

Every file is mapped, and none is executed or unpickled.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.token_files.llmq import MAGIC as LLMQ_MAGIC
from narrowgauge.data.token_files.llmq import open_llmq
from narrowgauge.data.token_files.megatron import is_megatron_index, open_megatron
from narrowgauge.data.token_files.token_file import HEADER_BYTES, Tokens, open_token_file, unfit
from narrowgauge.data.token_files.token_stream import Bits

BARE = "bare uint16"
_LLM_C = {20240520: "llm.c uint16", 20240801: "llm.c uint32"}
_LLM_C_OTHERS = {
    20240326: "a GPT-2 model",
    20240327: "a debug state",
    20240328: "a tokenizer",
    20240522: "an evaluation",
    20240527: "a training state",
    20240803: "a Llama 3 model",
}
# gzip, zstd, bzip2, xz, zip, parquet, PNG, JPEG, PDF, ELF, numpy, HDF5, SQLite, UTF-16 of either order
_NOT_TOKENS: tuple[bytes, ...] = (
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
    b"BZh",
    b"\xfd7zXZ",
    b"PK\x03\x04",
    b"PAR1",
)
_NOT_TOKENS += (b"\x89PNG", b"\xff\xd8\xff", b"%PDF", b"\x7fELF", b"\x93NUMPY", b"\x89HDF", b"SQLite")
_NOT_TOKENS += (b"\xff\xfe", b"\xfe\xff")
_PICKLED = tuple(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5))
_PRINTABLE = bytes([9, 10, 13, *range(32, 127)])
_SAMPLE_BYTES = 1 << 16
_FEW = 4096  # too few bytes to judge by repetition


@dataclass(frozen=True, eq=False)
class OpenFile:
    """A token file: its ids, mapped; and what its layout says of documents, targets and vocabulary.

    `files` are all that belong to it; `vocabulary` is (size, id between documents) if the layout states it.
    """

    path: Path
    layout: str
    tokens: Tokens
    files: tuple[Path, ...]
    boundary_first: bool = False
    starts: NDArray[np.int64] | None = None
    learnt: Bits | None = None
    vocabulary: tuple[int, int] | None = None


def layout_of(path: Path) -> str | None:
    """The layout of the file by its first bytes, its size and its neighbour; None: it is no token file.

    Errors: `OSError` for a file that cannot be read; `UserError` for one that is nearly a token file.
    """
    with path.open("rb") as file:
        head = file.read(_SAMPLE_BYTES)
    magic = struct.unpack("<i", head[:4])[0] if len(head) >= 4 else 0
    if magic in _LLM_C:
        return _LLM_C[magic]
    if magic in _LLM_C_OTHERS:
        raise unfit(path, f"it is {_LLM_C_OTHERS[magic]} of llm.c's")
    if head.startswith(LLMQ_MAGIC):
        return "llmq"
    index = path.with_suffix(".idx")
    if index.is_file() and is_megatron_index(index):
        return "Megatron"
    size = path.stat().st_size
    if size == 0 or size % 2 or _is_known(path, head) or _is_text(head) or not _repeats(head):
        return None
    if size >= HEADER_BYTES and not any(head[12:HEADER_BYTES]):
        version, count = struct.unpack("<2i", head[4:12])
        raise unfit(path, f"its header is unknown (magic {magic}, version {version}, {count} tokens)")
    return BARE


def open_file(path: Path, layout: str) -> OpenFile:
    """The tokens of a file of a layout that `layout_of` found.

    Errors: `UserError` for a file that is not whole or does not keep to its layout.
    """
    if layout in _LLM_C.values():
        tokens = open_token_file(path, fault=unfit)
        vocabulary = (50257, 50256) if tokens.dtype.itemsize == 2 else (128256, 128000)
        return OpenFile(path, layout, tokens, (path,), boundary_first=True, vocabulary=vocabulary)
    if layout == "Megatron":
        megatron = open_megatron(path)
        files = (path.with_suffix(".bin"), path.with_suffix(".idx"))
        return OpenFile(files[0], layout, megatron.tokens, files, starts=megatron.starts)
    if layout == "llmq":
        llmq = open_llmq(path)
        learnt = None if llmq.mask is None else Bits(llmq.mask, len(llmq.tokens))
        return OpenFile(path, layout, llmq.tokens, (path,), learnt=learnt)
    assert layout == BARE
    mapped: Tokens = np.memmap(path, dtype="<u2", mode="r")
    return OpenFile(path, layout, mapped, (path,))


def _is_known(path: Path, head: bytes) -> bool:
    """Whether the first bytes tell another kind; a pickle begins as tokens may, and ends on a dot."""
    if head.startswith(_PICKLED):
        with path.open("rb") as file:
            file.seek(-1, 2)
            return file.read() == b"."
    return head.startswith(_NOT_TOKENS)


def _is_text(head: bytes) -> bool:
    """Whether the bytes are text, be it with stray control characters or of an old 8-bit kind."""
    if len(head.translate(None, _PRINTABLE)) < len(head) / 5:
        return True
    controls = sum(byte < 9 for byte in head)
    whole = head.decode("utf-8", "ignore").encode("utf-8")  # the last character may be cut
    return controls < len(head) / 100 and len(whole) > len(head) - 4


def _repeats(head: bytes) -> bool:
    """Whether few of the numbers are different, as in a text's tokens and not in compressed bytes."""
    if len(head) < _FEW:
        return True
    numbers: NDArray[Any] = np.frombuffer(head[: len(head) // 2 * 2], "<u2")
    return len(np.unique(numbers)) < len(numbers) / 2
