"""Detects the layout of a token file from its content; the name does not matter.

| layout         | begins with                | the id between documents  | vocabulary              |
|----------------|----------------------------|---------------------------|-------------------------|
| llm.c          | int32 20240520 or 20240801 | precedes a document       | GPT-2's, or Llama 3's   |
| Megatron       | its .idx with `MMIDIDX`    | follows it, if present    | not stated              |
| llmq           | `BIN.TOK\\n`                | follows it                | not stated in full      |
| bare (nanoGPT) | a token: uint16, no header | follows it                | not stated              |

Ids of 4 or 8 bytes without a header are refused: read as uint16, every second value would be close to 0.

modded-nanogpt's files are llm.c's. A file is bare if it has an even number of bytes, matches none of the
other layouts, is not text, is not in a format recognised by its first bytes (compressed, parquet, pickled
...), and its values repeat as in a text: fewer than half of them are distinct.

Every file is memory-mapped; none is executed or unpickled.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.signatures import PICKLE, ZIP, LlmcMagic
from narrowgauge.data.token_files.llmq import MAGIC as LLMQ_MAGIC
from narrowgauge.data.token_files.llmq import open_llmq
from narrowgauge.data.token_files.megatron import is_megatron_index, open_megatron
from narrowgauge.data.token_files.token_file import HEADER_BYTES, Tokens, open_token_file, unfit
from narrowgauge.data.token_files.token_stream import Bits

BARE = "bare uint16"
_LLM_C = {LlmcMagic.TOKENS: "llm.c uint16", LlmcMagic.LLAMA3_TOKENS: "llm.c uint32"}
# gzip, zstd, bzip2, xz, zip, parquet, PNG, JPEG, PDF, ELF, numpy, HDF5, SQLite, UTF-16 of either order
_NOT_TOKENS: tuple[bytes, ...] = (
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
    b"BZh",
    b"\xfd7zXZ",
    ZIP,
    b"PAR1",
)
_NOT_TOKENS += (b"\x89PNG", b"\xff\xd8\xff", b"%PDF", b"\x7fELF", b"\x93NUMPY", b"\x89HDF", b"SQLite")
_NOT_TOKENS += (b"\xff\xfe", b"\xfe\xff")
_PRINTABLE = bytes([9, 10, 13, *range(32, 127)])
_SAMPLE_BYTES = 1 << 16
_FEW = 4096  # too few bytes to judge by repetition
_UPPER, _PAIRS = 32, 16  # upper halves of ids below 2 million; the fewest values to judge by these


@dataclass(frozen=True, eq=False)
class OpenFile:
    """A token file: its ids, memory-mapped, and the layout's facts on documents, targets and vocabulary."""

    path: Path  # the file with the ids
    layout: str
    tokens: Tokens
    files: tuple[Path, ...]  # all files that belong to it
    boundary_first: bool = False  # whether the id between documents comes before a document
    starts: NDArray[np.int64] | None = None  # of the documents, if the layout has an index
    target_mask: Bits | None = None
    vocabulary: tuple[int, int] | None = None  # (size, id between documents), if the layout states them


def layout_of(path: Path) -> str | None:
    """The layout of a file, by its first bytes, its size and its .idx; None if it does not hold tokens.

    Raises:
        OSError: the file cannot be read.
        UserError: it resembles a token file, but not one that can be read.
    """
    with path.open("rb") as file:
        head = file.read(_SAMPLE_BYTES)
    magic = struct.unpack("<i", head[:4])[0] if len(head) >= 4 else 0
    if magic in list(LlmcMagic):
        if (known := LlmcMagic(magic)) not in _LLM_C:
            raise unfit(path, f"it is {known.description} of llm.c's")
        return _LLM_C[known]
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
    if _is_wider(head):
        raise unfit(
            path,
            "every second value of it is close to 0, as in ids of 4 or 8 bytes, and ids without a header "
            "must be numpy.uint16",
        )
    return BARE


def open_file(path: Path, layout: str) -> OpenFile:
    """The tokens of a file in the layout that `layout_of` returned."""
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
        mask = None if llmq.mask is None else Bits(llmq.mask, len(llmq.tokens))
        return OpenFile(path, layout, llmq.tokens, (path,), target_mask=mask)
    assert layout == BARE
    mapped: Tokens = np.memmap(path, dtype="<u2", mode="r")
    return OpenFile(path, layout, mapped, (path,))


def _is_known(path: Path, head: bytes) -> bool:
    """Whether the file is in another format; a pickle may begin like tokens, but ends in a dot."""
    if head.startswith(PICKLE):
        with path.open("rb") as file:
            file.seek(-1, 2)
            return file.read() == b"."
    return head.startswith(_NOT_TOKENS)


def _is_text(head: bytes) -> bool:
    """Whether the bytes are text, even with stray control characters or in an old 8-bit encoding."""
    if len(head.translate(None, _PRINTABLE)) < len(head) / 5:
        return True
    controls = sum(byte < 9 for byte in head)
    valid = head.decode("utf-8", "ignore").encode("utf-8")  # the last character may be incomplete
    return controls < len(head) / 100 and len(valid) > len(head) - 4


def _repeats(head: bytes) -> bool:
    """Whether few of the values are distinct, as in tokens of text and not in compressed bytes."""
    if len(head) < _FEW:
        return True
    numbers: NDArray[Any] = np.frombuffer(head[: len(head) // 2 * 2], "<u2")
    return len(np.unique(numbers)) < len(numbers) / 2


def _is_wider(head: bytes) -> bool:
    """Whether the values are halves of int32 or quarters of int64, numpy's default dtypes for ids."""
    numbers: NDArray[Any] = np.frombuffer(head[: len(head) // 4 * 4], "<u2")
    low, high = numbers[0::2], numbers[1::2]
    upper = (high < _UPPER) | (high == 0xFFFF)  # of ids, or of a negative mark such as -100
    return len(high) >= _PAIRS and bool(upper.all()) and bool((low >= _UPPER).any())
