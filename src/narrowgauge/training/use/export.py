"""A run for other programs, and their models as runs.

    export    RUN -> plain weights under another program's names     hf, llmc, megatron
                  -> the narrow numbers themselves                   compressed-tensors
    import    a model of theirs -> RUN, which is sampled, evaluated and trained on from

Both make their folder whole or not at all.
"""

from pathlib import Path

from narrowgauge.checkpoint import save
from narrowgauge.checkpoint.interop.compressed_tensors import write_compressed
from narrowgauge.checkpoint.interop.external_model import read_external_model
from narrowgauge.checkpoint.interop.huggingface import write_folder
from narrowgauge.checkpoint.interop.llmc import write_llmc
from narrowgauge.checkpoint.interop.megatron import write_megatron
from narrowgauge.checkpoint.interop.safetensors_reader import SHARD_BYTES
from narrowgauge.data import load_tokenizer
from narrowgauge.errors import UserError, unknown
from narrowgauge.files import staged_directory
from narrowgauge.nn import DTYPES
from narrowgauge.training.run_directory import RunDirectory
from narrowgauge.training.use.trained_model import TrainedRun, imported_config, open_run

TARGETS = ("hf", "llmc", "megatron", "compressed-tensors")


def export_run(
    run: Path, to: str, out: Path, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> TrainedRun:
    """Write the newest model of a run, or any model that `open_run` opens, into a new folder.

    Args:
        run: what to export.
        to: one of `TARGETS`.
        out: the folder, which must not be there yet.
        dtype: of plain weights: "fp32", "bf16" or "fp16"; None: bf16 for compressed-tensors, else fp32.
        shard_bytes: about how large one safetensors file may be.

    Raises `UserError` for a model that the other format cannot hold.
    """
    if to not in TARGETS:
        raise unknown("format", to, TARGETS)
    dtype = dtype or ("bf16" if to == "compressed-tensors" else "fp32")
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if shard_bytes < 1:
        raise UserError(f"a shard of {shard_bytes} bytes holds nothing; about 5000000000 is usual")
    there = open_run(run, "cpu")
    config, weights, numbers = there.config.resolved_model(), there.weights(), DTYPES[dtype]
    with staged_directory(out) as folder:
        if to == "hf":
            write_folder(folder, config, weights, there.tokenizer_file, numbers, shard_bytes)
        elif to == "compressed-tensors":
            write_compressed(folder, there.model, weights, there.tokenizer_file, numbers, shard_bytes)
        elif to == "llmc":
            write_llmc(folder / "model.bin", config, weights, numbers)
        else:
            write_megatron(folder, config, weights, numbers, shard_bytes)
        if to in ("llmc", "megatron") and there.tokenizer_file is not None:
            there.tokenizer.save(folder / "tokenizer.json")
    return there


def import_model(path: Path, out: Path, tokenizer: Path | None = None, source: str = "stdlib") -> Path:
    """Make a run directory, at step 0, of a model that another program left.

    Args:
        path: a folder of Hugging Face's, one that `export` made, or an llm.c model file.
        out: the run directory, which must not be there yet.
        tokenizer: a tokenizer.json, or a folder with one; None: the model's own, if it came with one.
        source: text to evaluate it on, unless another is named then.

    Returns the run directory. Its recipe is fp32: the weights are what they were.

    Raises `UserError` for what is no model, a pickle, damage, or a tokenizer of more ids than the model has.
    """
    there = read_external_model(path)
    config = imported_config(there, source)
    found = tokenizer or there.tokenizer
    if found is not None and load_tokenizer(found).vocab_size > there.config.vocab_size:
        raise UserError(
            f"the tokenizer {found} has {load_tokenizer(found).vocab_size} ids, and the model {path} only "
            f"{there.config.vocab_size}; name the model's own with --tokenizer"
        )
    with staged_directory(out) as folder:
        directory = RunDirectory(folder)
        directory.claim(config)
        if found is not None:
            load_tokenizer(found).save(directory.tokenizer)
        save(directory.checkpoints, 0, {"model": there.tensors}, {}, config.checkpoint.keep, "imported")
        directory.record({"event": "import", "step": 0, "from": str(path), "kind": there.format})
        directory.set_status("done", f"imported from {path}")
    return out
