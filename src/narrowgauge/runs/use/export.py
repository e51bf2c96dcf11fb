"""Exports runs to the formats of other programs, and imports their models as runs.

    export    RUN -> plain weights under another program's names     hf, llmc
                  -> the quantized weights themselves                compressed-tensors, modelopt, gguf
    import    a model of another program -> RUN, to sample, evaluate or train from

Both create their folder atomically. An export is read back and compared with the weights that the run
multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from narrowgauge.checkpoint import save
from narrowgauge.checkpoint.interop.activations import InputScale, before_the_casts, in_llama_cpp
from narrowgauge.checkpoint.interop.compressed_tensors import narrow_layers, write_compressed
from narrowgauge.checkpoint.interop.external_model import read_external_model
from narrowgauge.checkpoint.interop.gguf.model import (
    GGUF_FILE,
    expected_values,
    read_gguf_model,
    write_gguf_model,
)
from narrowgauge.checkpoint.interop.huggingface import TOKENIZER_CONFIG, write_folder
from narrowgauge.checkpoint.interop.llmc import write_llmc
from narrowgauge.checkpoint.interop.modelopt import write_modelopt
from narrowgauge.checkpoint.interop.read_back import require_read_back
from narrowgauge.checkpoint.interop.safetensors_reader import SHARD_BYTES
from narrowgauge.data import load_tokenizer
from narrowgauge.errors import UserError, unknown
from narrowgauge.files import staged_directory
from narrowgauge.nn import DTYPES
from narrowgauge.recipes.exchange import TARGETS
from narrowgauge.runs.choices import EXPORT_FORMATS, READERS
from narrowgauge.runs.run_directory import RunDirectory
from narrowgauge.runs.use.calibration import activation_scales
from narrowgauge.runs.use.trained_model import TrainedRun, imported_config, open_run

#: The formats that hold the codes and scales of the forward matmul.
QUANTIZED = ("compressed-tensors", "modelopt")


@dataclass(frozen=True)
class Export:
    """The run that was exported, and sentences on what the format holds in another way."""

    run: TrainedRun
    remarks: tuple[str, ...] = ()


def export_run(
    run: Path,
    to: str,
    out: Path,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    calibrate: str | None = None,
) -> Export:
    """Write the newest model of a run, or of any model that `open_run` opens, into a new folder.

    Args:
        run: a run directory, or any model that `open_run` opens.
        to: one of `EXPORT_FORMATS`.
        out: the new folder, which must not exist.
        dtype: the dtype of plain weights, "fp32", "bf16" or "fp16"; None for fp32, or bf16 with
            quantized weights; of gguf for the narrower of bf16 and fp32 that is exact.
        shard_bytes: the approximate maximum size of a safetensors file.
        calibrate: where the stored scales of activations come from: a source of text, or `RECORDED` for the
            recipe's own; None to store none. Only with a format in `QUANTIZED`.

    Raises:
        UserError: an argument is invalid, the format cannot represent the model, or the written files differ.
    """
    require_format(to, dtype, shard_bytes, calibrate)
    source = open_run(run, "cpu")
    return Export(source, tuple(export_model(source, to, out, dtype, shard_bytes, calibrate)))


def require_format(to: str, dtype: str | None, shard_bytes: int, calibrate: str | None) -> None:
    """Refuse arguments of `export_run` that no model makes right."""
    if to not in EXPORT_FORMATS and to.lower() in READERS:
        *others, last = READERS[to.lower()]
        formats = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"unknown format {to!r}; {to} is a program, and --to takes what it reads: {formats}")
    if to not in EXPORT_FORMATS and to in TARGETS:
        raise UserError(
            f"unknown format {to!r}; 'narrowgauge recipes NAME --to {to}' writes a recipe for it, and export "
            f"writes weights ({', '.join(EXPORT_FORMATS)})"
        )
    if to not in EXPORT_FORMATS:
        raise unknown("format", to, EXPORT_FORMATS)
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if shard_bytes < 1:
        raise UserError(f"a shard of {shard_bytes} bytes holds nothing; about 5000000000 is usual")
    if calibrate is not None and to not in QUANTIZED:
        raise UserError(
            f"{to} holds no scales of activations, so --calibrate has no effect there; leave it out, or use "
            f"--to {' or '.join(QUANTIZED)}"
        )


def export_model(
    source: TrainedRun,
    to: str,
    out: Path,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    calibrate: str | None = None,
) -> list[str]:
    """`export_run` of a run that is open; returns the sentences."""
    scales = {} if calibrate is None else activation_scales(source, calibrate)
    with staged_directory(out) as folder:
        if to == "gguf":
            remarks = _write_gguf(folder, source, None if dtype is None else DTYPES[dtype])
        else:
            stored = DTYPES[dtype or ("bf16" if to in QUANTIZED else "fp32")]
            remarks = _write(folder, source, to, stored, shard_bytes, scales)
        if to in ("llmc", "gguf") and source.tokenizer_file is not None:
            source.tokenizer.save(folder / "tokenizer.json")
    return remarks


def _write(
    folder: Path,
    source: TrainedRun,
    to: str,
    dtype: torch.dtype,
    shard_bytes: int,
    scales: Mapping[str, InputScale],
) -> list[str]:
    config, weights = source.config.spec.model, source.weights()
    expected = {name: weight.to(dtype).float() for name, weight in weights.items()}
    settings = (source.tokenizer_file, dtype, shard_bytes, source.special_tokens)
    remarks = before_the_casts(source.model)
    if to == "hf":
        write_folder(folder, config, weights, *settings)
    elif to in QUANTIZED:
        write = write_compressed if to == "compressed-tensors" else write_modelopt
        remarks = write(folder, source.model, weights, *settings, scales)
        narrow = narrow_layers(source.model)
        expected |= {f"{name}.weight": layer.forward_weight() for name, layer in narrow.items()}
    else:
        write_llmc(folder / "model.bin", config, weights, dtype)
    require_read_back(read_external_model(folder).tensors, expected)
    return remarks


def _write_gguf(folder: Path, source: TrainedRun, dtype: torch.dtype | None) -> list[str]:
    path, weights = folder / GGUF_FILE, source.weights()
    settings = (source.tokenizer_file, dtype, source.special_tokens)
    remarks = write_gguf_model(path, source.model, weights, *settings) + in_llama_cpp(source.model)
    found = read_gguf_model(path, source.config.spec.model)
    require_read_back(found, expected_values(source.model, weights, dtype))
    return remarks


def import_model(path: Path, out: Path, tokenizer: Path | None = None, source: str = "stdlib") -> Path:
    """Make a run directory at step 0 from a model of another program.

    Args:
        path: a Hugging Face folder, a folder that `export` made, or a file of llm.c or GGUF.
        out: the new run directory, which must not exist.
        tokenizer: a tokenizer.json, or a folder with one; None for the model's tokenizer, if it has one.
        source: the default text for evaluation.

    Returns:
        The run directory. Its recipe is fp32, so the weights are unchanged.

    Raises:
        UserError: the path is not a model, is a pickle or is damaged, or the tokenizer has more ids than the
            model.
    """
    model = read_external_model(path)
    config = imported_config(model, source)
    chosen = tokenizer or model.tokenizer
    loaded = model.made_tokenizer if chosen is None else load_tokenizer(chosen)
    if loaded is not None and loaded.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer {chosen} has {loaded.vocab_size} ids, and the model {path} only "
            f"{model.config.vocab_size}; name the model's own with --tokenizer"
        )
    with staged_directory(out) as folder:
        directory = RunDirectory(folder)
        directory.claim(config)
        if loaded is not None:
            loaded.save(directory.tokenizer)
        is_own = chosen == model.tokenizer
        kept = {name: v for name, v in model.special_tokens.items() if is_own or name != TOKENIZER_CONFIG}
        directory.keep_special_tokens(kept)
        save(directory.checkpoints, 0, {"model": model.tensors}, {}, config.checkpoint.keep, "imported")
        facts = {"from": str(path), "kind": model.format, "precision": model.precision}
        directory.record({"event": "import", "step": 0, **facts})
        directory.set_status("done", f"imported from {path}")
    return out
