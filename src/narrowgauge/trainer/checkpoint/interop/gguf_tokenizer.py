"""The keys of GGUF for a tokenizer: the tokens, their merges, and the name of the rule that cuts text.

    tokenizer.ggml.model          "gpt2": byte-level BPE; "none": ids without text
    tokenizer.ggml.pre            the rule that cuts text into pieces, a name that llama.cpp knows
    tokenizer.ggml.tokens         the tokens by id; ids without a token are "[PADi]"
    tokenizer.ggml.token_type     1 normal, 3 control, 4 added, 5 unused
    tokenizer.ggml.merges         "left right", in their order
    tokenizer.ggml.*_token_id     the tokens that begin and end a text

GGUF stores no rule but its name, so a tokenizer with another rule is refused: llama.cpp would give other ids.
The same keys give the tokenizer back, with the rule of that name.
(Source: ggml-org/llama.cpp, `src/llama-vocab.cpp`.)
"""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, processors

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.huggingface import (
    CONFIG,
    TOKENIZER_CONFIG,
    tokens_around_a_text,
)
from narrowgauge.trainer.data import Tokenizer
from narrowgauge.trainer.data.tokenization.formats import PATTERNS, byte_level_bpe
from narrowgauge.trainer.data.tokenization.tokenizer import wrap_tokenizer

_NORMAL, _CONTROL, _ADDED, _UNUSED = 1, 3, 4, 5
_TOKEN_IDS = ("bos_token_id", "eos_token_id")


def tokenizer_keys(
    tokenizer: Tokenizer | None, entries: int, special_tokens: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys for a model with `entries` rows of its embedding, and perhaps without a tokenizer.

    `special_tokens` is the result of `huggingface.special_tokens_of`.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    file = json.loads(tokenizer.to_json())
    if file["model"]["type"] == "WordLevel":  # `ids-N`: text is not what the model reads
        return {"tokenizer.ggml.model": "none"}
    rule = _rule(file)
    added = {token["id"]: token["special"] for token in file["added_tokens"]}
    tokens, kinds = [f"[PAD{i}]" for i in range(entries)], [_UNUSED] * entries
    for token, i in tokenizer.library.get_vocab(with_added_tokens=True).items():
        tokens[i], kinds[i] = token, {True: _CONTROL, False: _ADDED, None: _NORMAL}[added.get(i)]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(m) if isinstance(m, list) else m for m in file["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": bool(tokenizer.library.encode("", add_special_tokens=True).ids),
    }
    token_ids = tokens_around_a_text(tokenizer, special_tokens)
    for name in _TOKEN_IDS:
        ids = token_ids.get(name)
        first = next((i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int), None)
        if first is not None and 0 <= first < entries:
            keys[f"tokenizer.ggml.{name}"] = first
    template = special_tokens.get(TOKENIZER_CONFIG, {}).get("chat_template")
    return keys | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of the keys of a file; None without one, or of another kind or rule."""
    rule, tokens = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.tokens")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or rule not in PATTERNS or not isinstance(tokens, list):
        return None
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    pairs = [str(pair).split(" ", 1) for pair in metadata.get("tokenizer.ggml.merges", [])]
    merges = [(left, right) for left, *rest in pairs for right in rest]
    normal = {str(token): i for i, token in enumerate(tokens) if kinds[i] == _NORMAL}
    added = {i: str(tokens[i]) for i, kind in enumerate(kinds) if kind in (_CONTROL, _ADDED)}
    # the ids that the library gives tokens it does not know
    free = range(len(normal), len(normal) + len(added))
    if list(added) != list(free) or sorted(normal.values()) != list(range(len(normal))):
        normal |= {token: i for i, token in added.items()}
    try:
        cut = PATTERNS[rule] if rule != "gpt-2" else None if merges else ""  # without merges no cut matters
        library = byte_level_bpe(normal, merges, cut, ignore_merges=rule == "llama-bpe")
    except Exception as error:  # the library has no narrower type
        raise UserError(f"the tokenizer keys of the file contradict each other: {error}") from None
    for i, token in added.items():
        entry = AddedToken(token, special=kinds[i] == _CONTROL, normalized=False)
        (library.add_special_tokens if kinds[i] == _CONTROL else library.add_tokens)([entry])
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", rule == "llama-bpe") and begin in added:
        before = [(added[begin], begin)]
        library.post_processor = processors.TemplateProcessing(
            single=f"{added[begin]} $A", special_tokens=before
        )
    return wrap_tokenizer(library, "the tokenizer of the file")


def settings_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens and the chat template in the keys of a file, as `huggingface.special_tokens_of`."""
    said = {name: metadata.get(f"tokenizer.ggml.{name}") for name in _TOKEN_IDS}
    tokens = {name: number for name, number in said.items() if type(number) is int}
    template = metadata.get("tokenizer.chat_template")
    found: dict[str, Any] = {CONFIG: tokens} if tokens else {}
    return found | ({TOKENIZER_CONFIG: {"chat_template": template}} if isinstance(template, str) else {})


def _rule(file: Mapping[str, Any]) -> str:
    """The name of the rule of a tokenizer.json."""
    cut = file["pre_tokenizer"] or {}
    steps = cut.get("pretokenizers", [cut])
    is_bytes = file["model"]["type"] == "BPE" and bool(steps) and steps[-1].get("type") == "ByteLevel"
    normalizer = (file["normalizer"] or {}).get("type", "NFC")
    if is_bytes and normalizer == "NFC" and not steps[-1].get("add_prefix_space"):
        splits, uses_gpt2 = steps[:-1], steps[-1].get("use_regex", True)
        if not splits and (uses_gpt2 or not file["model"]["merges"]):  # without merges no cut matters
            return "gpt-2"
        patterns = [(s.get("pattern") or {}).get("Regex") for s in splits if s.get("type") == "Split"]
        for name, pattern in PATTERNS.items():
            if patterns == [pattern] and len(splits) == 1 and not uses_gpt2:
                return name
    raise UserError(
        "the tokenizer of this run is not byte-level BPE with one of the rules that GGUF names "
        f"({', '.join(PATTERNS)}), and llama.cpp would read other ids; use --to hf and llama.cpp's converter"
    )
