"""Guards against two ways in which a tokenizer can silently corrupt a text.

**A control token from text.** `encode_special_tokens` keeps the library from matching the names of special
tokens in a text. A model that has such a name among its pieces (a Unigram model, a word list, a BPE with
merges that lead to it) produces the token anyway: `</s>` in an HTML page would become the end of a document.
In that case the name is cut after its first character, and its two parts are encoded one after the other. A
vocabulary that consists of words (`ids-N`) cannot be cut; there, a text may name the end of a document, but
not by accident.

**A character without a token.** A BPE starts from the characters of a word (if byte-level: from its bytes). A
character outside its vocabulary becomes its `unk_token` or, without one, is dropped. Such a text is refused.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer as Library

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data.tokenization.formats import byte_characters


class TextGuard:
    """The checks of one tokenizer; they cost little compared with the encoding."""

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
        added = (token["content"] for token in self._added if not token["special"])  # matched in the text
        return {token for token in bare if len(token) == 1}.union(*map(self._begun, added))

    def _begun(self, text: str) -> set[str]:
        return set(text) | {byte_characters()[byte] for byte in text.encode("utf-8")}

    def checked(self, text: str, ids: list[int], encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text without control tokens; `encode` encodes its parts."""
        if self._known is not None and (lost := next(self._lost(text), None)) is not None:
            raise UserError(
                f"the tokenizer has no token for {lost!r} and none for unknown characters, so it would "
                "leave it out of the text; add an unk_token or the 256 bytes to its model, or use another"
            )
        if self._control.isdisjoint(ids):
            return ids
        parted = [i for part in self._inside.split(text) for i in encode(part)]
        if found := self._control.intersection(parted):
            name = self._library.id_to_token(min(found))
            raise UserError(
                f"the tokenizer reads a part of the text as its control token {name!r}; remove it from the "
                "text"
            )
        return parted

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
