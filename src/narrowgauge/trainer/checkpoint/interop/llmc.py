"""llm.c's model files of GPT-2: `gpt2_124M.bin`, `gpt2_124M_bf16.bin`, `model_00001000.bin`; in and out.

    256 x int32, little-endian   [0] 20240326  [1] 3 = fp32, 5 = bf16  [2] longest sequence  [3] vocabulary
                                 [4] layers  [5] heads  [6] channels C  [7] padded vocabulary Vp, the rest 0
    wte (Vp, C)   wpe (T, C)
    then each of these for all layers before the next:
        ln1w  ln1b  qkvw (3C, C)  qkvb  attprojw (C, C)  attprojb
        ln2w  ln2b  fcw (4C, C)  fcb  fcprojw (C, 4C)  fcprojb
    lnfw  lnfb

(Source: karpathy/llm.c, `train_gpt2.py` write_model and `train_gpt2.cu` gpt2_write_to_checkpoint.)
Linear weights are (out, in) like ours, the head is tied, and the rows of the padding are zeros. A file is
recognised by its header, not by its name. Everything in a bf16 file is bf16, including the norms.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.hf_config import FAMILIES
from narrowgauge.trainer.checkpoint.interop.name_map import ExternalModel, parameter_shapes
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import PRECISIONS, refuse_pickle
from narrowgauge.trainer.checkpoint.store.before_save import is_finite
from narrowgauge.trainer.data.token_files.tokens import LlmcMagic
from narrowgauge.trainer.models import ModelConfig

VERSIONS = {3: torch.float32, 5: torch.bfloat16}
_NUMBERS = {torch.float32: "<i4", torch.bfloat16: "<i2"}  # the bits of each
#: What the header has from its third integer on, but for the padded vocabulary.
_SIZES = ("max_sequence_length", "vocab_size", "layers", "heads", "dim")
_EMBEDDING = "embedding.weight"
_HEADER = 256
_PAD_TO = 128
_MOST = 2**24  # the largest dimension: keeps the size of a forged file's tensors within an int64
_HINTS = {
    LlmcMagic.LLAMA3_MODEL: ", whose header rounds the norm's epsilon to 0: import its Hugging Face folder",
    LlmcMagic.TRAINING_STATE: ", whose weights are in the model_*.bin next to it",
}
#: What is not in the header, because it is the same in all of these models.
_GPT2: dict[str, Any] = {**FAMILIES["gpt2"].fixed, "experts": 0, "tied_head": True, "norm_eps": 1e-5}
_LAYER = ("attention_norm", "qkv", "attention_out", "mlp_norm", "up", "down")


def read_llmc(path: Path) -> ExternalModel:
    """The model in a file, with its weights as float32, without the rows of the padding.

    The format has no tokenizer; a tokenizer.json in the same folder is assumed to be the model's.
    """
    header = _header(path)
    config, padded = _config(path, header), int(header[7])
    if not config.vocab_size <= padded < config.vocab_size + 2**16:
        raise _wrong(path, f"a padded vocabulary of {padded} for one of {config.vocab_size}")
    dtype = VERSIONS[int(header[1])]
    shapes = _stored(config, padded)
    size = 4 * _HEADER + dtype.itemsize * sum(map(math.prod, shapes.values()))
    if path.stat().st_size != size:
        raise _wrong(path, f"{path.stat().st_size} bytes, where its header asks for {size}")
    tensors: dict[str, torch.Tensor] = {}
    with path.open("rb") as file:
        file.seek(4 * _HEADER)
        for name, shape in shapes.items():
            bits = torch.from_numpy(np.fromfile(file, _NUMBERS[dtype], math.prod(shape)))
            tensor = bits.view(dtype).float().view(shape)
            if not is_finite(tensor):
                raise _wrong(path, f"a NaN or an infinity in {name}")
            tensors[name] = tensor[: config.vocab_size].clone() if name == _EMBEDDING else tensor
    tokenizer = path.with_name("tokenizer.json") if path.with_name("tokenizer.json").is_file() else None
    return ExternalModel(path, "llmc", config, tensors, [PRECISIONS[dtype]], tokenizer, {})


def write_llmc(
    path: Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Write a new file that llm.c reads."""
    sizes = {"kv_heads": config.heads, "head_dim": config.dim / config.heads, "ffn_dim": 4 * config.dim}
    for name, value in (_GPT2 | sizes).items():
        if getattr(config, name) != value:
            raise UserError(
                f"llm.c's model files hold GPT-2 only, which has {name} = {value}, unlike this model; use "
                "--to hf"
            )
    versions = {d: version for version, d in VERSIONS.items()}
    if dtype not in versions:
        raise UserError(f"llm.c has no model files of {dtype}; use --dtype fp32 or --dtype bf16")
    padded = -(-config.vocab_size // _PAD_TO) * _PAD_TO
    header = np.zeros(_HEADER, dtype="<i4")
    of_header = (getattr(config, name) for name in _SIZES)
    header[:8] = (LlmcMagic.GPT2_MODEL, versions[dtype], *of_header, padded)
    with path.open("xb") as file:
        file.write(header.tobytes())
        for name, shape in _stored(config, padded).items():
            tensor = tensors[name].detach().cpu().to(dtype)
            if name == _EMBEDDING:
                tensor = torch.cat([tensor, tensor.new_zeros(padded - config.vocab_size, config.dim)])
            assert tensor.shape == shape
            bits = tensor.contiguous().view(torch.int32 if dtype == torch.float32 else torch.int16)
            file.write(bits.numpy().astype(_NUMBERS[dtype]).tobytes())


def _stored(config: ModelConfig, padded: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, in the order of the file."""
    parameters = [f"{module}.{parameter}" for module in _LAYER for parameter in ("weight", "bias")]
    layers = [f"blocks.{i}.{parameter}" for parameter in parameters for i in range(config.layers)]
    shapes = parameter_shapes(config) | {_EMBEDDING: (padded, config.dim)}
    order = (_EMBEDDING, "position_embedding.weight", *layers, "norm.weight", "norm.bias")
    return {name: shapes[name] for name in order}


def _header(path: Path) -> NDArray[np.int32]:
    refuse_pickle(path)
    with path.open("rb") as file:
        data = file.read(4 * _HEADER)
    header = np.frombuffer(data[: len(data) // 4 * 4], dtype="<i4")
    magic = int(header[0]) if len(header) else 0
    if magic not in list(LlmcMagic):
        raise UserError(
            f"{path} is not a model file: llm.c's begin with the integer {LlmcMagic.GPT2_MODEL}, and GGUF's "
            "end in .gguf; name one, or a folder: a run, or one of Hugging Face's"
        )
    if (known := LlmcMagic(magic)) != LlmcMagic.GPT2_MODEL:
        kind = known.kind + _HINTS.get(known, "")
        raise UserError(f"{path} is a file of llm.c's, but not a GPT-2 model: it is its {kind}")
    if len(header) < _HEADER:
        raise _wrong(path, f"{len(data)} bytes, where the header alone has {4 * _HEADER}")
    if int(header[1]) not in VERSIONS:
        raise _wrong(path, f"version {header[1]}, where 3 is fp32 and 5 is bf16")
    return header


def _config(path: Path, header: NDArray[np.int32]) -> ModelConfig:
    sizes: dict[str, Any] = dict(zip(_SIZES, map(int, header[2:7]), strict=True))
    if not all(0 < n < _MOST for n in sizes.values()):
        raise _wrong(path, "a dimension that is not positive, or too large for any model")
    layers, channels = sizes["layers"], sizes["dim"]
    if layers * (12 * channels + 13) * channels * 2 > path.stat().st_size:
        raise _wrong(path, f"{layers} layers of {channels} channels in {path.stat().st_size} bytes")
    try:
        return ModelConfig(**sizes, ffn_dim=4 * channels, initial_std=0.02, **_GPT2)
    except UserError as error:
        raise _wrong(path, str(error)) from None


def _wrong(path: Path, what: str) -> UserError:
    return UserError(f"{path} is a damaged model file of llm.c's: {what}; copy or make it again")
