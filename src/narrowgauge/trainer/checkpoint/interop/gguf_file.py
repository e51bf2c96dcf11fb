"""GGUF files, read and written by the package of llama.cpp, `gguf`, and rows of matrices in ggml's types.

    type    block   bytes of a block
    F32, F16, BF16  1
    Q8_0    32      d fp16, 32 int8                                         w = d * q
    MXFP4   32      s E8M0, 16 bytes: element i low, i + 16 high            w = 2^(s - 127) * q
    NVFP4   64      4 scales UE4M3, 4 x 8 bytes: element i low, i + 8 high  w = s * q * scale of the tensor

The scale of an NVFP4 tensor NAME.weight is a separate tensor, NAME.scale (fp32, 1); 1 without it. Both
4-bit types hold E2M1 codes, in another order than the bytes of other layouts. Q8_0 holds the codes of INT8
under E8M0, where fp16 holds d = 2^(s - 133) exactly. Blocks may also span rows: each row then repeats its
scale. Codes are moved, never rounded again. All other values are stored as BF16 or F32, whichever is the
narrower one that holds them exactly. Nothing in a file is executed.

A tokenizer is stored as keys: the tokens, their merges, and the name of the rule that cuts text.

    tokenizer.ggml.model          "gpt2": byte-level BPE; "none": ids without text
    tokenizer.ggml.pre            the rule that cuts text into pieces, a name that llama.cpp knows
    tokenizer.ggml.tokens         the tokens by id; ids without a token are "[PADi]"
    tokenizer.ggml.token_type     1 normal, 3 control, 4 added, 5 unused
    tokenizer.ggml.merges         "left right", in their order
    tokenizer.ggml.*_token_id     the tokens that begin and end a text

GGUF stores no rule but its name, so a tokenizer with another rule is refused: llama.cpp would give other ids.
The same keys give the tokenizer back, with the rule of that name.

(Sources: ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp, ggml-common.h and `src/llama-vocab.cpp`.)

Legend: N rows, K columns.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, processors

from narrowgauge.quantization import Cast, QTensor
from narrowgauge.quantization import cast as named_cast
from narrowgauge.recipes.describe import layout_of
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.huggingface import (
    CONFIG,
    TOKENIZER_CONFIG,
    tokens_around_a_text,
)
from narrowgauge.trainer.data import Tokenizer
from narrowgauge.trainer.data.sources.records import package
from narrowgauge.trainer.data.tokenization.formats import PATTERNS, byte_level_bpe
from narrowgauge.trainer.data.tokenization.tokenizer import wrap_tokenizer

GGUF_FILE = "model.gguf"
#: The type of each cast's codes, and the columns of a block.
_TYPE_OF = {"mxfp4": ("MXFP4", 32), "nvfp4": ("NVFP4", 16), "mxint8": ("Q8_0", 32)}
PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in PLAIN.items()}
_FP16_EXPONENTS = (-24, 15)  # powers of two that fp16 holds exactly
_NO_NUMBER = {"MXFP4": (1, 255), "NVFP4": (4, 127)}  # bytes of scales at the start of a block, and their NaN


@dataclass(frozen=True)
class StoredRows:
    """A tensor as the bytes of a type."""

    type: str  # ggml's name of the type
    data: NDArray[np.uint8]  # (length of the first dimension, bytes of each)
    shape: tuple[int, ...]  # (N, K), (N,) of a vector, or (E, N, K) of the matrices of experts
    # the scale of a matrix, which multiplies all values; a file holds it as another tensor
    scale: float | None = None


@dataclass(frozen=True)
class GgufFile:
    """The contents of a file: its keys, and its tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredRows]


def library() -> Any:
    """The package, imported; a `UserError` if it is not installed."""
    return package("gguf", "a GGUF file", "gguf")


def block_of(kind: str) -> tuple[int, int]:
    """(elements, bytes) of a block of a type."""
    gguf = library()
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(elements), int(size)


def read_gguf(path: Path) -> GgufFile:
    """The keys and tensors of a file, whose bytes are mapped; a `UserError` if it is damaged."""
    gguf = library()

    class Bounded(gguf.GGUFReader):  # type: ignore[misc,name-defined]
        """The reader, which refuses what reaches beyond the file: numpy would cut it without a word."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if not offset <= end <= len(self.data):
                raise ValueError(f"it ends beyond the {len(self.data)} bytes of the file: it was cut off")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Bounded(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, LookupError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; fetch it again") from None
    tensors = {}
    for tensor in reader.tensors:
        shape, data = tuple(map(int, reversed(tensor.shape))), tensor.data.reshape(-1).view(np.uint8)
        rows = data.reshape(shape[0], -1) if shape and shape[0] else data
        tensors[tensor.name] = StoredRows(tensor.tensor_type.name, rows, shape)
    own = "GGUF."  # begins the reader's own fields, which are not keys of the file
    metadata = {key: value for key, value in fields.items() if not key.startswith(own)}
    return GgufFile(path, metadata, tensors)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredRows]) -> None:
    """Write a new file of version 3.

    The values of `metadata` are texts, booleans, floats (stored as float32), ints (as uint32; as int32 if
    negative or in a list) and lists of one of them. `general.architecture` is among its keys.
    """
    gguf = library()
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
    for key, value in metadata.items():
        if isinstance(value, list | tuple):
            writer.add_array(key, value or [""])  # an empty list would be left out, and llama.cpp asks for it
        elif key != "general.architecture":
            of_int = writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32
            add.get(type(value), of_int)(key, value)
    for name, tensor in tensors.items():
        data = tensor.data.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[tensor.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plain_rows(values: torch.Tensor, dtype: torch.dtype | None = None) -> StoredRows:
    """Values in a dtype, or by default in the narrower of bf16 and fp32 that is exact; vectors in fp32."""
    values = values.detach().float().contiguous()
    if dtype is None:
        is_exact = torch.equal(values.bfloat16().float(), values)
        dtype = torch.bfloat16 if is_exact else torch.float32
    if values.ndim == 1:  # ggml adds and multiplies vectors in fp32
        dtype = torch.float32
    data = values.to(dtype).view(len(values), -1).view(torch.uint8).numpy()
    return StoredRows(_NAMES[dtype], data, tuple(values.shape))


def type_of(cast: Cast, columns: int) -> str | None:
    """The type that holds the codes of a cast in rows of `columns` columns; None if there is none."""
    for name, (kind, width) in _TYPE_OF.items():
        alike = layout_of(cast) | {"block": None} == layout_of(named_cast(name)) | {"block": None}
        if alike and cast.block is not None and cast.block[1] == width:
            return kind if columns % block_of(kind)[0] == 0 else None
    return None


def code_rows(q: QTensor, kind: str) -> StoredRows | None:
    """The codes and scales of a quantized matrix in a type of `type_of`; None if fp16 cannot hold a scale."""
    assert q.scale_codes is not None
    assert q.cast.block is not None
    N, K = q.codes.shape
    scales = q.scale_codes.repeat_interleave(q.cast.block[0], dim=0)[:N].cpu().numpy()
    codes = q.codes.cpu().numpy()
    if kind == "Q8_0":
        codes = codes.reshape(N, -1, 32)
        exponents = scales.astype(np.int32) - 133  # the element int8 counts steps of 2^-6
        exponents = np.where(codes.any(-1), exponents, 0)
        low, high = _FP16_EXPONENTS
        if exponents.min() < low or exponents.max() > high:
            return None
        parts = np.ldexp(np.float32(1), exponents).astype("<f2")[..., None].view(np.uint8), codes
    elif kind == "MXFP4":
        parts = scales[..., None], _nibbles(codes, 32)
    else:
        parts = scales.reshape(N, -1, 4), _nibbles(codes, 16).reshape(N, -1, 32)
    scale = float(q.tensor_scale) if kind == "NVFP4" else None
    return StoredRows(kind, np.concatenate(parts, -1).reshape(N, -1), (N, K), scale)


def values_of(rows: StoredRows) -> torch.Tensor:
    """The values of rows, float32 of their shape; NaN in a 4-bit block whose scale is NaN.

    Raises `NotImplementedError` if the package does not decode their type.
    """
    gguf, (elements, size), data = library(), block_of(rows.type), np.ascontiguousarray(rows.data)
    lines = data.reshape(-1, rows.shape[-1] // elements * size)
    with np.errstate(all="ignore"):  # the reader refuses what is not finite
        found = np.require(gguf.quants.dequantize(lines, gguf.GGMLQuantizationType[rows.type]), None, "W")
    if rows.type in _NO_NUMBER:  # which the package reads as one
        scales, code = _NO_NUMBER[rows.type]
        found.reshape(-1, elements)[(data.reshape(-1, size)[:, :scales] == code).any(1)] = np.nan
    values = torch.from_numpy(found).reshape(rows.shape)
    return values if rows.scale is None else values * rows.scale


def _nibbles(codes: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """(N, K) codes of 4 bits -> (N, K / width, width / 2): the first half of a block low, the second high."""
    blocks = codes.reshape(len(codes), -1, width)
    return np.bitwise_or(blocks[..., : width // 2], blocks[..., width // 2 :] << 4, dtype=np.uint8)


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
