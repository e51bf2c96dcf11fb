"""Untrustworthy folders: refused in one sentence, and nothing in them is run or followed."""

import json
import pickle
import shutil
import struct

import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.checkpoint.interop.external_model import read_external_model
from narrowgauge.checkpoint.interop.huggingface import write_folder
from narrowgauge.checkpoint.interop.safetensors_reader import INDEX, TensorFolder
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer, model_config
from support.fault_table import case


class _Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture
def model():
    return Transformer(model_config("debug", dim=64, layers=2, ffn_dim=96, vocab_size=67))


@pytest.fixture
def folder(tmp_path, model):
    (tmp_path / "there").mkdir()
    write_folder(tmp_path / "there", model.config, model.state_dict(), None)
    return tmp_path / "there"


@pytest.fixture
def parts(tmp_path, model):
    (tmp_path / "parts").mkdir()
    write_folder(tmp_path / "parts", model.config, model.state_dict(), None, shard_bytes=50_000)
    return tmp_path / "parts"


def refused(path, *words):
    with pytest.raises(UserError) as error:
        read_external_model(path)
    said = str(error.value)
    assert all(str(word) in said for word in words), said
    assert "\n" not in said


def with_header(path, change):
    """A safetensors file with another header."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_what_is_sound_is_read(folder, parts):
    assert read_external_model(folder).tensors.keys() == read_external_model(parts).tensors.keys()


@case("C6", tier="quick")
def test_tensors_that_overlap(folder):
    def overlap(header):
        header["model.norm.weight"]["data_offsets"] = header["model.embed_tokens.weight"]["data_offsets"]

    with_header(folder / "model.safetensors", overlap)
    refused(folder, folder / "model.safetensors", "cannot be trusted", "fetch or make it again")


@pytest.mark.parametrize("offsets", [[0, 2**40], [-1, 255], [10, 5]])
def test_tensors_beyond_the_file(folder, offsets):
    with_header(folder / "model.safetensors", lambda h: h["model.norm.weight"].update(data_offsets=offsets))
    refused(folder, folder / "model.safetensors", "cannot be trusted")


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_torn_file(folder, cut):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    refused(folder, path, "cannot be trusted")


@case("C6", tier="quick")
@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".hidden"]
)
def test_an_index_that_leads_out_of_the_folder(parts, name, model):
    shutil.copy(next(parts.glob("*.safetensors")), parts.parent / "outside.safetensors")
    index = json.loads((parts / INDEX).read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = name
    (parts / INDEX).write_text(json.dumps(index))
    refused(parts, repr(name), "outside itself")


@case("C6", tier="quick")
def test_a_link_that_leads_out_of_the_folder(folder):
    path = folder / "model.safetensors"
    path.rename(folder.parent / "outside.safetensors")
    path.symlink_to(folder.parent / "outside.safetensors")
    refused(folder, path, "a link that leads out")


def test_the_links_of_the_download_cache_are_followed(folder):
    """Hugging Face keeps `snapshots/REVISION/model.safetensors -> ../../blobs/DIGEST`."""
    home = folder.parent / "models--who--what"
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots" / "abc").mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        (home / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/{number}")
        file.rename(home / "blobs" / str(number))
    assert read_external_model(home / "snapshots" / "abc").config.dim == 64


def test_an_index_of_other_things(parts):
    (parts / INDEX).write_text('{"weight_map": {"model.norm.weight": 3}}')
    refused(parts, parts / INDEX, "no weight_map")
    (parts / INDEX).write_text("[" * 100_000)
    refused(parts, parts / INDEX, "not JSON")


def test_an_index_that_misplaces_a_tensor(parts):
    index = json.loads((parts / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(
        f for f in files if f != index["weight_map"]["model.norm.weight"]
    )
    (parts / INDEX).write_text(json.dumps(index))
    refused(parts, "'model.norm.weight'", INDEX)


@case("C5", tier="quick")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_folder_of_pickles(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": torch.ones(64)}, folder / name)
    refused(folder, folder / name, "a pickle", "save it as safetensors")
    (folder / "config.json").unlink()
    refused(folder, folder / name, "a pickle")


@case("C5", tier="quick")
def test_a_pickle_under_another_name(folder, parts, tmp_path):
    mark = tmp_path / "executed"
    trap = pickle.dumps(_Trap(mark))
    (folder / "model.safetensors").write_bytes(trap)
    refused(folder, folder / "model.safetensors", "a pickle")
    index = json.loads((parts / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model.bin")
    (parts / INDEX).write_text(json.dumps(index))
    (parts / "model.bin").write_bytes(trap)
    refused(parts, parts / "model.bin", "a pickle")
    (tmp_path / "gpt2_124M.bin").write_bytes(trap)
    refused(tmp_path / "gpt2_124M.bin", "a pickle")
    assert not mark.exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_that_are_no_plain_weights(folder, dtype):
    tensors = TensorFolder(folder)
    read = {name: tensors.read(name) for name in tensors.file_of}
    read["model.norm.weight"] = read["model.norm.weight"].to(dtype)
    save_file(read, folder / "model.safetensors")
    refused(folder, "'model.norm.weight'", str(dtype), "unquantized")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(folder, value):
    tensors = TensorFolder(folder)
    read = {name: tensors.read(name) for name in tensors.file_of}
    read["model.norm.weight"][3] = value
    save_file(read, folder / "model.safetensors")
    refused(folder, "'model.norm.weight'", "NaN or an infinity")


def test_what_is_nothing(tmp_path, folder):
    (tmp_path / "train.bin").write_bytes(bytes(100))  # of tokens: no pickle, and not called one
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, "is not a model")
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor")
    (folder / "config.json").write_text("[1]")
    refused(folder, folder / "config.json", "not one JSON object")


def test_weights_that_a_dtype_cannot_hold_are_not_written(tmp_path, model):
    """Half precision ends at 65504: they became infinite in the exported file."""
    weights = dict(model.state_dict())
    weights["norm.weight"] = torch.full((64,), 1e5)
    with pytest.raises(UserError, match=r"'model\.norm\.weight' has values that torch\.float16 cannot hold"):
        write_folder(tmp_path, model.config, weights, None, torch.float16)
