"""llmq's token files: one file, all values little-endian.

| bytes       | content                                                                                 |
|-------------|-----------------------------------------------------------------------------------------|
| 0 to 7      | `BIN.TOK\\n`                                                                             |
| 8 to 1023   | int32: version (1 or 2), bytes of a token (4), token count; in version 2 the size of    |
|             | the vocabulary, without added tokens, and 1 if there is a mask; then padding            |
| 4 x count   | the tokens, int32; after each document its end-of-document id                           |
| count / 8   | the mask, if there is one, rounded up to bytes: bit i % 8 of byte i // 8 is 1 where     |
|             | token i is a target of the loss                                                         |

The file has exactly that length. Source: `src/training/dataloader.cpp` and `scripts/tokenize_data.py` of
github.com/IST-DASLab/llmq.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.token_files.token_file import HEADER_BYTES, Tokens, unfit

MAGIC = b"BIN.TOK\n"


@dataclass(frozen=True, eq=False)
class LlmqFile:
    """The tokens and the bytes of the mask (None without one), memory-mapped and read-only."""

    tokens: Tokens
    mask: NDArray[np.uint8] | None


def open_llmq(path: Path) -> LlmqFile:
    """The tokens of an llmq file; a `UserError` if its header or its length violates the layout."""
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise unfit(path, f"it has {len(raw)} bytes, but the header alone has {HEADER_BYTES}")
    version, width, count, vocab_size, masked = np.frombuffer(raw, "<i4", 5, len(MAGIC)).tolist()
    if version not in (1, 2):
        raise unfit(path, f"its version is {version}, and 1 and 2 are known")
    if version == 1:  # the two are padding
        vocab_size = masked = 0
    if width != 4:
        raise unfit(path, f"its tokens have {width} bytes, and 4 are known")
    if count < 1 or vocab_size < 0 or masked not in (0, 1):
        raise unfit(path, f"its header is damaged ({count} tokens, {vocab_size} ids, mask {masked})")
    end = HEADER_BYTES + 4 * count
    size, right = path.stat().st_size, end + masked * -(-count // 8)
    if size != right:
        raise unfit(path, f"its header promises {count} tokens, so {right} bytes, and it has {size}")
    tokens = np.memmap(path, dtype="<i4", mode="r", offset=HEADER_BYTES, shape=(count,))
    mask = np.memmap(path, dtype=np.uint8, mode="r", offset=end) if masked else None
    return LlmqFile(tokens, mask)
