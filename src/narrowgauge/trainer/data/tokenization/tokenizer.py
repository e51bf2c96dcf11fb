"""Tokenizers: from text to ids and back.

Three tokenizers are built in, and any other is read from its files (`formats.py`):

- `bytes`: id = byte of the UTF-8 text, 0 to 255; id 256 ends a document. It needs no training and can encode
  any text.
- `bpe-N`: byte-level byte pair encoding (Sennrich et al., arXiv 1508.07909; on bytes as in GPT-2). It starts
  from the 256 bytes and, N - 257 times, gives a new id to the pair of ids that is most frequent in the
  training text. Id 0 ends a document. A text too small to contain that many pairs gives fewer ids.
- `ids-N`: for tokens without their tokenizer. Text is the ids themselves, in decimal, each after a space, and
  the last of the N ends a document; `ids-50257` stands for GPT-2's.

The first two decode to exactly the text they encoded. All are saved as a `tokenizer.json`, which other
programs can read: `bytes` is a byte-level BPE without merges, and is recognised by that.

The end of a document is an id that no text can produce: where a text happens to contain the characters
`<|endoftext|>`, they are encoded like any other characters (`TextGuard`).

**Words.** `batch_encoder` encodes texts faster than the library, to the same ids: bytes as they are, and
words from a cache, so that no word is encoded twice. GPT-2's tokenizer, like every byte-level BPE modelled on
it, cuts a text into pieces by a pattern and encodes each piece separately:

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

No piece has white space after another character, and no match depends on text before its start. There is thus
always a cut before a run of white space, and a text is a sequence of *words*: a run of white space and the
run of other characters after it. The ids of a text are the concatenated ids of its words. The ids of a word
are looked up, and the library computes them only for a new word. Half of English is a few hundred words.

The pattern and its definition of white space: `pre_tokenizers/byte_level.rs` of
github.com/huggingface/tokenizers, and Unicode's property White_Space, which Oniguruma's `\\s` matches.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.system.files import user_path, write_whole
from narrowgauge.trainer.data.tokenization.formats import (
    TOKENIZER_FILE,
    byte_characters,
    byte_level_bpe,
    read_library,
    tokenizer_files,
)

END_OF_DOCUMENT = "<|endoftext|>"

# Names for the id between documents in other tokenizers: GPT-2, Llama 3, Llama 2, Gemma; OLMo's and BERT's
# kind; and nanochat, which like us begins a document with it.
_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]", "<|bos|>")
_PARALLELISM = "TOKENIZERS_PARALLELISM"

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORD = re.compile(f"[{_SPACE}]*[^{_SPACE}]+|[{_SPACE}]+")
_MOST_WORDS = 1 << 18  # words in the cache: some 60 MB
_MOST_LENGTH = 64  # characters of a word in the cache

Ids = NDArray[np.unsignedinteger[Any]]
EncodeAll = Callable[[list[str]], Iterable[Sequence[int] | Ids]]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Converts text to ids and back.

    Attributes:
        library: The tokenizer of the `tokenizers` library.
        vocab_size: The highest id + 1.
        end_of_document: The id before every document.
        is_bytes: Whether this is the `bytes` tokenizer.
    """

    library: Library
    vocab_size: int
    end_of_document: int
    is_bytes: bool

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without the end of a document.

        Raises:
            UserError: the text has a lone surrogate, or a word or character without an id.
        """
        try:
            utf8 = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"the text holds half a surrogate pair (U+{ord(text[error.start]):04X}) at character "
                f"{error.start}, which UTF-8 cannot encode; remove it"
            ) from None
        return list(utf8) if self.is_bytes else self._guard.checked(text, self._ids(text), self._ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        try:
            encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # as in `_ids`
            raise _cannot_encode(error) from None
        pairs = zip(texts, encodings, strict=True)
        return [self._guard.checked(text, encoding.ids, self._ids) for text, encoding in pairs]

    @cached_property
    def _guard(self) -> "TextGuard":
        return TextGuard(self.library)

    def _ids(self, text: str) -> list[int]:
        try:
            return list(self.library.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library has no narrower type for a word without an id
            raise _cannot_encode(error) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; never raises.

        Bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary are dropped, and the end of a
        document is written as its name.
        """
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        return self.library.decode(known, skip_special_tokens=False)

    def decode_after(self, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
        """The text that `new_ids` add to the text of `prompt_ids`.

        A decoder may drop the blank before the first word of a text, so both are decoded together.
        """
        before, text = self.decode(prompt_ids), self.decode([*prompt_ids, *new_ids])
        return text.removeprefix(before) if text.startswith(before) else self.decode(new_ids)

    def to_json(self) -> str:
        """The text of tokenizer.json; equal for equal tokenizers."""
        return self.library.to_str(pretty=True) + "\n"

    @cached_property
    def digest(self) -> str:
        """The hexadecimal sha256 of `to_json`; tokenizers are equal if their digests are."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def save(self, path: Path) -> None:
        """Write the tokenizer.json to `path`, in full or not at all."""
        write_whole(path, self.to_json())


def bytes_tokenizer() -> Tokenizer:
    """The tokenizer whose ids are the bytes of the text; 256 ends a document."""
    return wrap_tokenizer(_bytes_library())


def train_bpe(texts: Iterable[str], entries: int) -> Tokenizer:
    """Train a byte-level BPE of at most `entries` ids on `texts`; the same texts give the same ids."""
    library = byte_level_bpe({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return wrap_tokenizer(library)


def ids_tokenizer(vocab_size: int, end_of_document: int) -> Tokenizer:
    """The tokenizer whose text is token ids in decimal, as in `"464 3290"`; see `ids-N` above."""
    assert 0 <= end_of_document < vocab_size
    names = {str(i): i for i in range(vocab_size) if i != end_of_document}
    library = Library(models.WordLevel(vocab=names | {END_OF_DOCUMENT: end_of_document}))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.Replace(Regex("^"), " ")  # before each id, so that texts can be concatenated
    return wrap_tokenizer(library)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in the file or folder `path`, in any format of `formats.py`.

    Raises:
        UserError: it is missing, is not a tokenizer, or has no id for the end of a document.
    """
    library = read_library(path)
    # A file may contain settings for batches of padded sentences, which would change or drop tokens.
    library.no_truncation()
    library.no_padding()
    return wrap_tokenizer(library, str(path))


def make_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer called `name`; `bpe-N` is trained on `texts`."""
    kind, entries = _built_in(name)
    if kind == "bytes":
        return bytes_tokenizer()
    if kind == "ids":
        return ids_tokenizer(entries, entries - 1)
    return train_bpe(texts, entries) if kind == "bpe" else load_tokenizer(_existing(name))


def tokenizer_identity(name: str) -> str:
    """What determines the ids of a text: the name of a built-in tokenizer, or the digest of its files."""
    if _built_in(name)[0]:
        return name
    content = b"".join(file.read_bytes() for file in tokenizer_files(_existing(name)))
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _built_in(name: str) -> tuple[str, int]:
    """The kind of a built-in tokenizer and its N; "" for another name."""
    match = re.fullmatch(r"bytes|(bpe|ids)-([1-9][0-9]*)", name)
    if match is None or match[1] is None:
        return (name if match else ""), 0
    kind, digits = match.groups()
    if len(digits) > 7:  # the library allocates memory for all N entries at once
        raise UserError(f"tokenizer {name!r} is too large: a vocabulary has at most {kind}-9999999 entries")
    if kind == "bpe" and int(digits) < 257:
        raise UserError(
            f"tokenizer {name!r} is too small: 256 bytes and the end of a document need at least bpe-257"
        )
    return kind, int(digits)


def _existing(name: str) -> Path:
    path = user_path(name)
    try:
        if tokenizer_files(path):
            return path
    except OSError as error:
        raise UserError(
            f"cannot look for tokenizer file {name!r}: {error.strerror}; name a tokenizer.json"
        ) from None
    if path.suffix or len(path.parts) > 1:
        raise UserError(f"tokenizer file {name!r} does not exist; name a tokenizer.json, bytes or bpe-4096")
    raise unknown("tokenizer", name, ["bytes", "bpe-4096", "bpe-N", "ids-N", TOKENIZER_FILE])


def wrap_tokenizer(library: Library, origin: str = "the tokenizer") -> Tokenizer:
    """A tokenizer of the library as ours; a `UserError` if it has no id for the end of a document."""
    vocabulary = library.get_vocab(with_added_tokens=True)
    end = next((name for name in _ENDS if name in vocabulary), None)
    if end is None:
        special = sorted(token.content for token in library.get_added_tokens_decoder().values())
        raise UserError(
            f"{origin} has no id for the end of a document under a known name (its special tokens: "
            f"{', '.join(special[:8]) or 'none'}); rename or add one in its file: {', '.join(_ENDS)}"
        )
    # By default the library matches special tokens in the text. `encode_special_tokens` prevents that, but
    # only for special tokens, and in some files the end of a document is an ordinary entry.
    library.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    library.encode_special_tokens = True
    is_bytes = library.to_str() == _bytes_library().to_str()
    return Tokenizer(library, max(vocabulary.values()) + 1, vocabulary[end], is_bytes)


@contextmanager
def parallel_tokenizing() -> Iterator[None]:
    """Tokenize on all cores inside the block, and keep the library from warning about later forks.

    The library warns at every later fork unless the variable TOKENIZERS_PARALLELISM is set. After the block
    it stays at "false", with which a forked child tokenizes on one core and cannot deadlock. A value set by
    the user is kept.
    """
    of_user = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = of_user or "true"
    try:
        yield
    finally:
        os.environ[_PARALLELISM] = of_user or "false"


def _bytes_library() -> Library:
    """The byte-level BPE without merges."""
    library = byte_level_bpe({char: byte for byte, char in enumerate(byte_characters())}, [], "")
    library.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return library


def _cannot_encode(error: Exception) -> UserError:
    return UserError(
        f"the tokenizer has no id for a word of the text ({error}); a run on token ids whose "
        "tokenizer is unknown expects ids as text, as in '464 3290'"
    )


class TextGuard:
    """Guards against two ways in which a tokenizer can silently corrupt a text, at little cost.

    **A control token from text.** `encode_special_tokens` keeps the library from matching the names of
    special tokens in a text. A model that has such a name among its pieces (a Unigram model, a word list,
    a BPE with merges that lead to it) produces the token anyway: `</s>` in an HTML page would become the
    end of a document. In that case the name is cut after its first character, and its two parts are
    encoded one after the other. A vocabulary that consists of words (`ids-N`) cannot be cut; there, a
    text may name the end of a document, but not by accident.

    **A character without a token.** A BPE starts from the characters of a word (if byte-level: from its
    bytes). A character outside its vocabulary becomes its `unk_token` or, without one, is dropped. Such a
    text is refused.
    """

    def __init__(self, library: Library) -> None:
        facts = json.loads(library.to_str())
        self._library, self._added = library, facts["added_tokens"]
        names = {token["id"]: token["content"] for token in self._added if token["special"]}
        names.pop(_unknown_id(facts["model"]), None)
        only_words = facts["model"]["type"] == "WordLevel" and _unknown_id(facts["model"]) is None
        self._control = frozenset(() if only_words else names)
        cuts = (f"(?<={re.escape(n[0])})(?={re.escape(n[1:])})" for n in names.values() if len(n) > 1)
        self._inside = re.compile("|".join(cuts) or r"(?!)")
        self._known = self._characters(facts["model"])
        self._is_byte_level = '"ByteLevel"' in json.dumps(facts["pre_tokenizer"])
        if self._known is not None and self._is_byte_level and self._known.issuperset(byte_characters()):
            self._known = None

    def _characters(self, model: dict[str, Any]) -> set[str] | None:
        """The characters that have a token; None if unknown characters have one."""
        if model["type"] != "BPE" or model["unk_token"] is not None:
            return None
        vocabulary = model["vocab"]
        if model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            return None
        prefix, suffix = model["continuing_subword_prefix"] or "", model["end_of_word_suffix"] or ""
        bare = (token.removeprefix(prefix).removesuffix(suffix) for token in vocabulary)
        added = "".join(token["content"] for token in self._added if not token["special"])  # matched in texts
        letters = byte_characters()
        of_added = {*added, *(letters[byte] for byte in added.encode("utf-8"))}
        return {token for token in bare if len(token) == 1} | of_added

    def checked(self, text: str, ids: list[int], encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text without control tokens; `encode` encodes its parts."""
        if self._known is not None and (lost := next(self._lost(text), None)) is not None:
            raise UserError(
                f"the tokenizer has no token for {lost!r} and none for unknown characters, so it would "
                "leave it out of the text; add an unk_token or the 256 bytes to its model, or use another"
            )
        if self._control.isdisjoint(ids):
            return ids
        ids = [i for part in self._inside.split(text) for i in encode(part)]
        if found := self._control.intersection(ids):
            name = self._library.id_to_token(min(found))
            raise UserError(
                f"the tokenizer reads a part of the text as its control token {name!r}; remove it from the "
                "text"
            )
        return ids

    def _lost(self, text: str) -> Iterator[str]:
        """The characters of the text (byte-level: of a byte) that would be dropped."""
        assert self._known is not None
        normalizer, cutter = self._library.normalizer, self._library.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer else text
        if self._is_byte_level:
            letters = byte_characters()
            return (
                c
                for c in dict.fromkeys(text)
                if not self._known.issuperset(letters[byte] for byte in c.encode("utf-8"))
            )
        strange = set(text) - self._known
        if strange and cutter:  # it may drop or replace characters, in particular white space
            strange = {c for piece, _ in cutter.pre_tokenize_str(text) for c in piece} - self._known
        return iter(sorted(strange))


def _unknown_id(model: dict[str, Any]) -> int | None:
    """The id of a model's unknown token, which stands for text."""
    if "unk_id" in model:
        return model["unk_id"]
    vocabulary: dict[str, int] = model["vocab"]
    return vocabulary.get(model.get("unk_token") or "")


def batch_encoder(tokenizer: Tokenizer, dtype: np.dtype[Any]) -> EncodeAll:
    """The fastest function that gives the tokenizer's ids for each text, which `dtype` can hold."""
    if tokenizer.is_bytes:
        return lambda texts: (np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts)
    by_words = word_encoder(tokenizer, dtype)
    return tokenizer.encode_batch if by_words is None else partial(map, by_words)


def word_encoder(tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Callable[[str], Ids] | None:
    """`tokenizer.encode` into an array of `dtype`, word by word; None if words depend on each other.

    They do not in a byte-level BPE with GPT-2's pattern, none of whose parts looks across pieces.
    """
    facts = json.loads(tokenizer.library.to_str())
    cut, model = facts["pre_tokenizer"] or {}, facts["model"]
    is_by_words = (
        facts["normalizer"] is None
        and (cut.get("type"), cut.get("use_regex"), cut.get("add_prefix_space")) == ("ByteLevel", True, False)
        and (model.get("type"), model.get("dropout")) == ("BPE", None)
        and all(token["special"] for token in facts["added_tokens"])  # not matched in the text
    )
    if not is_by_words:
        return None
    ids_of = _WordCache(tokenizer).__getitem__
    return lambda text: np.fromiter(chain.from_iterable(map(ids_of, _WORD.findall(text))), dtype)


class _WordCache(dict[str, tuple[int, ...]]):
    """The ids of the words so far; a new word is encoded, and stored while there is room."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._encode(word))
        if len(self) < _MOST_WORDS and len(word) <= _MOST_LENGTH:
            self[word] = ids
        return ids
