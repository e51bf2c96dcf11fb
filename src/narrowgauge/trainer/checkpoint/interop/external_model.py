"""Reads the model at a path. Content decides its format: a folder's files, or a file's first bytes."""

from pathlib import Path

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop import huggingface
from narrowgauge.trainer.checkpoint.interop.gguf_model import read_gguf_external
from narrowgauge.trainer.checkpoint.interop.llmc import read_llmc
from narrowgauge.trainer.checkpoint.interop.name_map import ExternalModel
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import (
    INDEX,
    SINGLE_FILE,
    begins_with,
    pickle_at,
    refuse_pickle,
)
from narrowgauge.trainer.data.token_files.tokens import LlmcMagic

_GGUF = b"GGUF"  # the first bytes of a file


def is_external_model(path: Path) -> bool:
    """Whether `read_external_model` should read, or refuse, what is at `path`: anything but a run."""
    if path.is_file():
        return True
    if not path.is_dir() or (path / "config.toml").exists():
        return False
    names = (huggingface.CONFIG, INDEX, SINGLE_FILE)
    is_known = any((path / name).exists() for name in names) or pickle_at(path) is not None
    return is_known or _only_file(path) is not None


def read_external_model(path: Path) -> ExternalModel:
    """Read the model of another program, or of an export, at `path`."""
    try:
        if path.is_dir():
            if (path / huggingface.CONFIG).is_file():
                return huggingface.read_folder(path)
            if (file := _only_file(path)) is not None:
                return read_external_model(file)
            if (path / "config.toml").is_file():
                raise UserError(
                    f"{path} is already a run: pass it directly to sample, eval or --model.weights"
                )
            refuse_pickle(path)
            raise UserError(
                f"{path} is not a model: it has neither {huggingface.CONFIG} (Hugging Face) nor config.toml "
                "(a run); name a folder that has one of them, or an llm.c model file"
            )
        if path.is_file():
            return read_gguf_external(path) if begins_with(path, _GGUF) else read_llmc(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}; fix its permissions or copy it again") from error
    raise UserError(f"{path} does not exist; name a Hugging Face folder, or a file of llm.c or GGUF")


def _only_file(folder: Path) -> Path | None:
    """The only model file of llm.c or GGUF in a folder, as `export` leaves it; None if not one of a kind."""
    for suffix, magic in ((".bin", LlmcMagic.GPT2_MODEL.to_bytes(4, "little")), (".gguf", _GGUF)):
        files = [path for path in sorted(folder.glob(f"*{suffix}")) if begins_with(path, magic)]
        if len(files) == 1:
            return files[0]
    return None
