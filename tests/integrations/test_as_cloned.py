"""nanoGPT and nanochat as they are cloned: converted, and trained by their own code.

Each test runs where a variable names a checkout (`support/cloned.py`).
"""

import pickle
import runpy
import sys
from importlib import import_module

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.nn import Stepped
from support.cloned import cloned

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64}


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4"])
@pytest.mark.filterwarnings("ignore")  # of their code: files that are not closed, old names of torch
def test_train_py_of_nanogpt_trains_a_converted_model(recipe, tmp_path, monkeypatch, capsys):
    path = cloned("nanoGPT", monkeypatch)
    for part in ("train", "val"):
        (np.arange(4096) % 97).astype(np.uint16).tofile(tmp_path / f"{part}.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 128}))  # as its scripts prepare data
    monkeypatch.chdir(path)  # it reads its configurator there
    theirs = import_module("model")
    built, made = theirs.GPT, []
    convert = lambda config: made.append(ng.convert(built(config), recipe)) or made[0]  # noqa: E731
    monkeypatch.setattr(theirs, "GPT", convert)
    options = TINY | {"dataset": tmp_path, "out_dir": tmp_path / "out", "device": "cpu", "compile": False}
    options |= {"dtype": "float32", "max_iters": 8, "eval_interval": 8, "eval_iters": 2, "log_interval": 1}
    options |= {"batch_size": 8, "block_size": 32, "gradient_accumulation_steps": 2, "warmup_iters": 1}
    options |= {"lr_decay_iters": 8, "learning_rate": 0.01}
    words = [f"--{key}={value}" for key, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    runpy.run_path(str(path / "train.py"), run_name="__main__")
    told = [line.split() for line in capsys.readouterr().out.splitlines() if "train loss" in line]
    losses = [float(words[4][:-1]) for words in told]
    assert losses[-1] < losses[0] - 0.5, losses
    converted = {name for name, layer in made[0].named_modules() if isinstance(layer, Stepped)}
    assert {"transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"} <= converted


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_the_model_and_optimizer_of_nanochat_train_under_a_recipe(recipe, monkeypatch):
    cloned("nanochat", monkeypatch)
    gpt = import_module("nanochat.gpt")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(sequence_len=32, vocab_size=128, n_kv_head=2, **TINY))
    model.init_weights()
    ng.convert(model, recipe, keep=["lm_head", "*gate*"], also=[gpt.Linear])
    optimizer = model.setup_optimizer()
    text = torch.arange(33 * 8).reshape(8, 33) % 97
    losses = []
    with torch.compiler.set_stance("force_eager"):  # its optimizer is compiled; the values are the same
        for _ in range(6):
            loss = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
            loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, losses
    assert isinstance(model.transformer.h[1].mlp.c_fc, Stepped)
