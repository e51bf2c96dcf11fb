"""Untrustworthy folders: refused in one sentence, and nothing in them is run or followed."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.interop.models import refused
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.huggingface import write_folder
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import INDEX
from narrowgauge.trainer.models import Transformer, model_config
from support.fault_table import case
from support.hostile import MALFORMED, Bomb

ONE, NORM = "model.safetensors", "model.norm.weight"


@pytest.fixture(scope="module")
def model():
    return Transformer(model_config("debug", dim=64, layers=2, ffn_dim=96, vocab_size=67))


def written(path, model, **how):
    path.mkdir()
    write_folder(path, model.config, model.state_dict(), None, **how)
    return path


@pytest.fixture
def folder(tmp_path, model):
    return written(tmp_path / "there", model)


@pytest.fixture
def parts(tmp_path, model):
    return written(tmp_path / "parts", model, shard_bytes=50_000)


@case("C6", tier="quick")
def test_a_file_that_is_malformed_or_torn(folder, parts):
    assert read_external_model(folder).tensors.keys() == read_external_model(parts).tensors.keys()
    data = (folder / ONE).read_bytes()
    for bad in (*MALFORMED.values(), *(data[:cut] for cut in (0, 7, 100, -1))):
        (folder / ONE).write_bytes(bad)
        refused(folder, folder / ONE, "cannot be trusted", "fetch or make it again")


NORMS = [
    (torch.Tensor.char, ("torch.int8", "unquantized")),
    (lambda t: t.to(torch.float8_e4m3fn), ("float8_e4m3fn", "unquantized")),
    (lambda t: t * torch.nan, ("NaN or an infinity",)),
    (lambda t: t / 0, ("NaN or an infinity",)),
]


@case("C5", tier="quick")
def test_a_folder_without_plain_weights(folder):
    sound = load_file(folder / ONE)
    for change, words in NORMS:
        save_file(sound | {NORM: change(sound[NORM])}, folder / ONE)
        refused(folder, NORM, *words)
    (folder / ONE).unlink()
    refused(folder, "neither model.safetensors nor")
    config = (folder / "config.json").read_text()
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        torch.save({NORM: torch.ones(64)}, folder / name)
        refused(folder, folder / name, "a pickle", "save it as safetensors")
        (folder / "config.json").unlink()
        refused(folder, folder / name, "a pickle")
        (folder / "config.json").write_text(config)
        (folder / name).unlink()
    (folder / "config.json").write_text("[1]")
    refused(folder, folder / "config.json", "not one JSON object")


@case("C6", tier="quick")
def test_an_index_that_leads_elsewhere(parts):
    shutil.copy(next(parts.glob("*.safetensors")), parts.parent / "outside.safetensors")
    index = json.loads((parts / INDEX).read_text())
    files = index["weight_map"]
    other = next(name for name in sorted(set(files.values())) if name != files[NORM])
    outside = ("../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".hidden")
    for name, words in [
        *((name, (repr(name), "outside itself")) for name in outside),
        (3, (parts / INDEX, "no weight_map")),
        (other, (repr(NORM), INDEX)),
    ]:
        (parts / INDEX).write_text(json.dumps(index | {"weight_map": files | {NORM: name}}))
        refused(parts, *words)
    (parts / INDEX).write_text("[" * 100_000)
    refused(parts, parts / INDEX, "not JSON")


@case("C6", tier="quick")
def test_links_are_followed_within_the_download_cache_alone(folder):
    """Hugging Face keeps `snapshots/REVISION/model.safetensors -> ../../blobs/DIGEST`."""
    home = folder.parent / "models--who--what"
    there = home / "snapshots" / "abc"
    (home / "blobs").mkdir(parents=True)
    there.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        (there / file.name).symlink_to(f"../../blobs/{number}")
        shutil.copy(file, home / "blobs" / str(number))
    assert read_external_model(there).config.dim == 64
    (folder / ONE).rename(folder.parent / "outside.safetensors")
    (folder / ONE).symlink_to(folder.parent / "outside.safetensors")
    refused(folder, folder / ONE, "a link that leads out")


@case("C5", tier="quick")
def test_a_pickle_under_another_name(folder, parts, tmp_path):
    trap = pickle.dumps(Bomb(tmp_path / "executed"))
    (folder / ONE).write_bytes(trap)
    refused(folder, folder / ONE, "a pickle")
    files = json.loads((parts / INDEX).read_text())["weight_map"]
    (parts / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(files, "model.bin")}))
    (parts / "model.bin").write_bytes(trap)
    refused(parts, parts / "model.bin", "a pickle")
    (tmp_path / "gpt2_124M.bin").write_bytes(trap)
    refused(tmp_path / "gpt2_124M.bin", "a pickle")
    assert not (tmp_path / "executed").exists()


def test_what_is_nothing(tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(100))  # of tokens: no pickle, and not called one
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, "is not a model")


def test_weights_that_a_dtype_cannot_hold_are_not_written(tmp_path, model):
    """Half precision ends at 65504: they became infinite in the exported file."""
    weights = model.state_dict() | {"norm.weight": torch.full((64,), 1e5)}
    with pytest.raises(UserError, match=r"'model\.norm\.weight' has values that torch\.float16 cannot"):
        write_folder(tmp_path, model.config, weights, None, torch.float16)
    assert os.listdir(tmp_path) == []
