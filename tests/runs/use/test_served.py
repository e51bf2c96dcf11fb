"""The same text through trainer and server: equal where the file is sound, different where it is not."""

import dataclasses
import json
import math
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.read_back import Difference
from narrowgauge.trainer.runs.use.export import export_run
from narrowgauge.trainer.runs.use.served import DIFFERENT, EQUAL, UNDECIDED, Compared, Served, served

# Blocks of NVFP4 in GGUF have 64 columns.
SIZES = {"model.dim": 64, "model.ffn_dim": 128, "model.layers": 4, "training.steps": 2}
#: The mean KL(file, server) that llama.cpp's arithmetic explains: int8 activations with narrow weights.
KL = {"bf16": 1e-5, "mxfp4": 1e-4, "nvfp4": 1e-4, "mxint8": 1e-4}


def result(differences, texts=(0, 2), margin=0.01, of_file=None, **facts):
    compared = Compared(differences, [0.0], [0.0], [1.0])
    losses = {"trainer": 2.0, "file": 2.0, "server": 2.0}
    subject = {"run": "run", "step": 1, "server": "llama.cpp", "version": "1", "format": "gguf"}
    subject |= {"sequences": len(differences), "sequence_length": 8}
    facts = {"weights": (2, 2), "inputs": ("nvfp4",)} | facts
    to_file = Compared(differences if of_file is None else of_file, [0.0], [0.0], [1.0])
    return Served(subject, losses, compared, to_file, texts, margin, **facts)


def test_the_verdict_is_that_of_the_interval():
    for differences, texts, verdict in [
        ([0.001, 0.002, 0.0], (0, 2), EQUAL),
        ([0.02, 0.021, 0.019], (0, 2), DIFFERENT),
        ([-0.02, -0.021, -0.019], (0, 2), DIFFERENT),
        ([0.0, 0.02, -0.01], (0, 2), UNDECIDED),
        ([0.0, 0.0, 0.0], (1, 2), DIFFERENT),
        ([0.0, 0.0, 0.0], None, EQUAL),
        ([math.nan, 0.0, 0.0], (0, 2), DIFFERENT),
    ]:
        assert result(differences, texts).verdict == verdict, differences
    broken = result([math.nan, 0.0])
    broken.to_trainer.kl.append(math.nan)
    assert json.dumps(broken.as_json(), allow_nan=False)


def test_the_part_of_narrow_inputs_is_named_if_nothing_else_differs():
    differences, of_file = [-0.018, -0.022, -0.020], [0.001, -0.001, 0.0]
    found = result(differences, of_file=of_file)
    assert (found.verdict, found.file_verdict) == (DIFFERENT, EQUAL)
    assert found.of_inputs.mean == pytest.approx(-0.02)
    assert "inputs that training rounds to nvfp4 make -0.02000" in found.table()
    assert found.as_json()["inputs_alone"]["mean"] == pytest.approx(-0.02)
    assert result(differences).of_inputs is None  # the server does not compute as the file
    for facts in ({"different": (Difference("a", "b", "c"),)}, {"inputs": ()}):
        assert result(differences, of_file=of_file, **facts).of_inputs is None


def test_two_passes_are_compared_token_by_token():
    first = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]], dtype=torch.float64).log()
    second = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]], dtype=torch.float64).log()
    compared = Compared()
    for _ in range(2):
        compared.add(first, second, torch.tensor([0, 2]))
    kl = 0.5 * math.log(2) - 0.25 * math.log(2)
    found = compared.as_json()
    assert found["kl"] == {"mean": pytest.approx(kl / 2), "max": pytest.approx(kl)}
    half = pytest.approx(math.log(2) / 2)
    assert found["log_probability_change"] == {"mean": half, "max": pytest.approx(math.log(2))}
    assert found["same_top_token"] == 0.5
    assert compared.differences == [pytest.approx(math.log(2) / 2)] * 2
    compared.add(first, second * math.nan, torch.tensor([0, 2]))
    assert math.isnan(compared.as_json()["kl"]["max"])


def test_mistakes_are_refused_before_anything_is_exported(tmp_path):
    wrong = [
        ({"server": "ollama"}, "unknown server"),
        ({"server": "llama.cpp", "format": "hf"}, "unknown format of llama.cpp"),
        ({"server": "llama.cpp", "sequences": 1}, "no interval"),
        ({"server": "llama.cpp", "margin": 0.0}, "no interval"),
        ({"server": "llama.cpp", "margin": math.nan}, "no interval"),
    ]
    if find_spec("vllm") is None:
        wrong.append(({"server": "vllm"}, "vllm is not installed here; python -m pip install vllm"))
    for given, words in wrong:
        with pytest.raises(UserError, match=words):
            served(tmp_path / "nowhere", **given)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", KL)
def test_llama_cpp_serves_what_the_file_holds(trained, recipe):
    run = trained(SIZES | {"recipe.name": recipe})
    found = served(run, "llama.cpp", sequences=4, margin=0.02)
    assert found.file_verdict == EQUAL, found.table()
    assert found.to_file.as_json()["kl"]["mean"] < KL[recipe], found.table()
    # The other two multiplied activations of 4 bits in training, which llama.cpp does not.
    assert found.verdict == EQUAL or recipe in ("mxfp4", "nvfp4"), found.table()
    assert found.weights[0] == found.weights[1], found.table()
    assert (found.weights[1] == 0) == (recipe == "bf16")
    assert (found.of_inputs is None) == (recipe == "bf16")
    assert found.texts is not None
    assert found.texts[0] == 0


@pytest.mark.tier("thorough")
def test_transformers_serves_an_export(trained):
    found = served(trained(SIZES | {"recipe.name": "bf16"}), "transformers", "hf", sequences=4, margin=0.02)
    assert found.verdict == EQUAL, found.table()
    assert dataclasses.replace(found, margin=1e-12).verdict != EQUAL
    assert found.weights == (0, 0)
    assert found.texts is not None
    assert found.texts[0] == 0


#: What is done to a scale of one layer; each leaves a file that loads.
DESTROYED = [
    ("nvfp4", "self_attn.k_proj", "weight_global_scale", 1.25),
    ("fp8", "mlp.down_proj", "input_scale", 1.0),
    ("fp8", "mlp.down_proj", "input_scale", 64.0),
]


@pytest.mark.tier("nightly", keep=1)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("recipe", "layer", "part", "factor"), DESTROYED)
def test_a_destroyed_scale_is_different_whatever_the_loss(
    trained, tmp_path, text, recipe, layer, part, factor
):
    name = f"model.layers.1.{layer}.{part}"
    run = trained(SIZES | {"recipe.name": recipe})
    export_run(run, "compressed-tensors", tmp_path / "out", calibrate=text if recipe == "fp8" else None)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    found = served(run, "transformers", folder=tmp_path / "out", sequences=2, margin=1000.0)
    assert found.verdict == (EQUAL if factor == 1 else DIFFERENT), found.table()
    assert found.subject["format"] == "compressed-tensors"
    if recipe == "nvfp4":
        assert [difference.name for difference in found.different] == [name]
        assert found.weights[1] - found.weights[0] == 1  # q, k and v are one weight of ours
        assert found.of_inputs is None
        assert found.as_json()["first_other_tensor"] == name
        assert f"{name} has other bytes" in found.table()
