"""Tensors in a folder of safetensors files, as other programs write and read them.

    model.safetensors                      all tensors in one file, or
    model-00001-of-00003.safetensors ...   parts, and
    model.safetensors.index.json           {"metadata": {"total_size": bytes},
                                            "weight_map": {tensor: file, ...}}

A folder that was saved in parts and later in one file has both: the single file is newer, and is read.
(Layout: Hugging Face `transformers`, `save_pretrained`.) Files of other programs are not trusted. File names
in an index must be plain names of files in the folder itself. The safetensors library refuses tensors that
overlap, leave gaps or reach beyond the file. A pickle is recognised by its content and never opened, because
unpickling can run arbitrary code.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.store.before_save import is_finite
from narrowgauge.trainer.checkpoint.store.manifest import json_object, plain_name, read_bounded
from narrowgauge.trainer.checkpoint.store.safetensors_writer import write_safetensors
from narrowgauge.trainer.data.token_files.tokens import PICKLE, ZIP

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
_LARGEST_JSON = 256 << 20
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


class TensorFolder:
    """The tensors of a folder, read one at a time; its files are open as long as it lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self.file_of = self._find()

    def read_stored(self, name: str, at: tuple[int | slice, ...] = ()) -> torch.Tensor:
        """A tensor as it is stored, or the part of it at an index, which is read alone."""
        file = self._handle(self.file_of[name])
        try:
            tensor: torch.Tensor = file.get_slice(name)[at] if at else file.get_tensor(name)
        except SafetensorError as error:
            raise _damaged(self.folder / self.file_of[name], str(error)) from error
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._handle(self.file_of[name]).get_slice(name).get_shape())

    def _find(self) -> dict[str, str]:
        """The file of each tensor; a single file takes precedence over an index, as in transformers."""
        if (self.folder / SINGLE_FILE).exists():
            return dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        if (self.folder / INDEX).exists():
            listed = read_json(inside(self.folder, INDEX)).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
                raise UserError(
                    f"{self.folder / INDEX} has no weight_map of tensors and files; fetch the folder again"
                )
            names = {file: set(self._handle(file).keys()) for file in dict.fromkeys(listed.values())}
            for name, file in listed.items():
                if name not in names[file]:
                    raise _damaged(self.folder / file, f"it has no tensor {name!r}, which {INDEX} lists")
            return dict(listed)
        refuse_pickle(self.folder)
        raise UserError(
            f"{self.folder} has neither {SINGLE_FILE} nor {INDEX}, and other files of weights are not read; "
            "give a folder that transformers' save_pretrained wrote"
        )

    def _handle(self, name: str) -> Any:
        """The open file."""
        if name not in self._files:
            path = inside(self.folder, name)
            if not name.endswith(".safetensors"):
                refuse_pickle(path)
                raise UserError(
                    f"{self.folder / INDEX} names {name!r}, and only .safetensors files are read; "
                    "save the model as safetensors"
                )
            try:
                self._files[name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                refuse_pickle(path)
                raise _damaged(path, str(error)) from error
        return self._files[name]


def write_tensors(
    folder: Path,
    tensors: Sequence[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors as one file, or as several of about `shard_bytes` with an index.

    Floating-point tensors are converted to `dtype`, a file at a time; None keeps each dtype.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = total = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if size and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += nbytes
        total += nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        converted = {name: t.to(dtype or t.dtype) for name, t in shard.items()}
        if beyond := [name for name, t in converted.items() if not is_finite(t)]:
            raise UserError(f"{beyond[0]!r} has values that {dtype} cannot hold; choose another --dtype")
        write_safetensors(folder / file, converted, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def inside(folder: Path, name: str) -> Path:
    """The real path of a file in `folder`; a `UserError` if it is missing or outside.

    The download cache of Hugging Face keeps files in `blobs/`, next to `snapshots/REVISION/`, and links to
    them: such a link is followed, any other link out of the folder is refused.
    """
    if not plain_name(name):
        raise UserError(
            f"{folder} names a file {name!r} outside itself, and only files of the folder are read; "
            "fetch the folder again from a source that you trust"
        )
    home = folder.resolve()
    real = (folder / name).resolve()
    roots = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(root) for root in roots):
        raise UserError(
            f"{folder / name} is a link that leads out of the folder, to {real}; put the file itself there"
        )
    if not real.is_file():
        raise UserError(f"{folder / name} is missing, or not a file; fetch the folder again")
    return real


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a `UserError` if there is none, or it cannot be read."""
    data = read_bounded(path, _LARGEST_JSON)
    return json_object(data, lambda reason: _damaged(path, f"it {reason}"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with a key on each line."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether a file can be read and begins with these bytes."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(magic)) == magic
    return False


def pickle_at(path: Path) -> Path | None:
    """A file whose first bytes mark a pickle, whatever it is called, or the first one in a folder.

    A safetensors file may begin with the same bytes, so ask only of files that are not safetensors.
    """
    files = [path] if path.is_file() else [p for p in sorted(path.iterdir()) if p.suffix in _PICKLE_SUFFIXES]
    for file in filter(Path.is_file, files):
        with file.open("rb") as stream:
            if stream.read(4).startswith((ZIP, *PICKLE)):
                return file
    return None


def refuse_pickle(path: Path) -> None:
    """Refuse a pickle at a path; the error names it."""
    if file := pickle_at(path):
        raise UserError(
            f"{file} is a pickle, and nothing is ever unpickled because that can run any code; load it with "
            "the program it came from and save it as safetensors"
        )


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} cannot be trusted: {reason}; fetch or make it again")
