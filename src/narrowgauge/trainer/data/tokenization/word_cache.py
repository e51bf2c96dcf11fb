"""A cache of encoded words: encodes text faster than the library, to the same ids.

No word is encoded twice. GPT-2's tokenizer, like every byte-level BPE modelled on it, cuts a text into pieces
by a pattern and encodes each piece separately:

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

No piece has white space after another character, and no match depends on text before its start. There is thus
always a cut before a run of white space, and a text is a sequence of *words*: a run of white space and the
run of other characters after it. The ids of a text are the concatenated ids of its words. The ids of a word
are looked up, and the library computes them only for a new word. Half of English is a few hundred words.

The pattern and its definition of white space: `pre_tokenizers/byte_level.rs` of
github.com/huggingface/tokenizers, and Unicode's property White_Space, which Oniguruma's `\\s` matches.
"""

import json
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.trainer.data.tokenization.tokenizer import Tokenizer

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORD = re.compile(f"[{_SPACE}]*[^{_SPACE}]+|[{_SPACE}]+")
_MOST_WORDS = 1 << 18  # words in the cache: some 60 MB
_MOST_LENGTH = 64  # characters of a word in the cache

Encode = Callable[[str], NDArray[np.unsignedinteger[Any]]]


def word_encoder(tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Encode | None:
    """`tokenizer.encode` into an array of `dtype`, word by word; None if words depend on each other."""
    if not _cuts_before_white_space(tokenizer):
        return None
    cache = _WordCache(tokenizer)

    def encode(text: str) -> NDArray[np.unsignedinteger[Any]]:
        ids = map(cache.__getitem__, _WORD.findall(text))
        return np.fromiter(chain.from_iterable(ids), dtype)

    return encode


class _WordCache(dict[str, tuple[int, ...]]):
    """The ids of the words so far; a new word is encoded, and stored while there is room."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._encode = tokenizer.encode

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._encode(word))
        if len(self) < _MOST_WORDS and len(word) <= _MOST_LENGTH:
            self[word] = ids
        return ids


def _cuts_before_white_space(tokenizer: Tokenizer) -> bool:
    """Whether it is a byte-level BPE with GPT-2's pattern, none of whose parts looks across pieces."""
    facts = json.loads(tokenizer.library.to_str())
    cut, model = facts["pre_tokenizer"] or {}, facts["model"]
    return (
        facts["normalizer"] is None
        and (cut.get("type"), cut.get("use_regex"), cut.get("add_prefix_space")) == ("ByteLevel", True, False)
        and (model.get("type"), model.get("dropout")) == ("BPE", None)
        and all(token["special"] for token in facts["added_tokens"])  # not matched in the text
    )
