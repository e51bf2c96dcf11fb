"""llm.c's model files, as its own script writes them: read whatever their name, the same bytes again."""

import copy

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from checkpoint.interop.models import model_under, ours_from, refused
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.llmc import read_llmc, write_llmc

V, T, C, L, N = 150, 32, 48, 3, 4  # padded to 256
ORDER = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight"]
ORDER += ["attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias"]
ORDER += ["mlp.c_proj.weight", "mlp.c_proj.bias"]


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=C, n_layer=L, n_head=N))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_((1.0 if ".ln_" in name else 0.0) + 0.15 * torch.randn(p.shape))
    return model.eval()


def as_llmc_writes(model, version):
    """The file's bytes, from transformers' model, in the order that llm.c's `write_tensors` has."""
    header = np.zeros(256, dtype="<i4")
    header[:8] = 20240326, version, T, V, L, N, C, 256
    state = {name.removeprefix("transformer."): t for name, t in model.state_dict().items()}
    tensors = [torch.cat([state["wte.weight"], torch.zeros(256 - V, C)]), state["wpe.weight"]]
    for name in ORDER:
        for i in range(L):
            tensor = state[f"h.{i}.{name}"]
            tensors.append(tensor.T if tensor.ndim == 2 else tensor)
    tensors += [state["ln_f.weight"], state["ln_f.bias"]]
    flat = torch.cat([t.flatten() for t in tensors])
    bits = flat.numpy() if version == 3 else flat.bfloat16().view(torch.int16).numpy()
    return header.tobytes() + bits.tobytes()


@pytest.mark.parametrize(("version", "dtype"), [(3, torch.float32), (5, torch.bfloat16)])
def test_a_file_of_llmc_gives_its_logits_and_the_same_bytes_again(theirs, tmp_path, version, dtype):
    path = tmp_path / ("gpt2_bf16.bin" if version == 3 else "gpt2_fp32.bin")  # a name proves nothing
    path.write_bytes(as_llmc_writes(theirs, version))
    there = read_llmc(path)
    ids = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rounded = copy.deepcopy(theirs).to(dtype).float()
        assert (ours_from(there)(ids) - rounded(ids).logits).abs().max() < 1e-5
    write_llmc(tmp_path / "again", there.config, there.tensors, dtype)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    path.rename(tmp_path / "model.bin")
    (tmp_path / "again").unlink()
    assert read_external_model(tmp_path).config == there.config, "a folder with one such file is that model"


def header_with(at, value):
    def change(data):
        return data[: 4 * at] + int(value).to_bytes(4, "little", signed=True) + data[4 * at + 4 :]

    return change


DAMAGE = [
    (lambda data: data[:-1], ["bytes, where its header asks for"]),
    (lambda data: data + b"\0", ["bytes, where its header asks for"]),
    (lambda data: data[:500], ["where the header alone has 1024"]),
    (lambda data: b"", ["is not a model file"]),
    (lambda data: b"PK\x03\x04" + data, ["a pickle", "save it as safetensors"]),
    (header_with(0, 20240520), ["it is its tokens"]),
    (header_with(0, 20240803), ["llama3 model", "Hugging Face"]),
    (header_with(1, 4), ["version 4", "3 is fp32"]),
    (header_with(4, 2**30), ["dimension"]),
    (header_with(4, 1000), ["1000 layers"]),
    (header_with(5, 5), ["multiple of model.heads = 5"]),
    (header_with(6, -48), ["dimension that is not positive"]),
    (header_with(7, 100), ["padded vocabulary of 100"]),
    (lambda data: data[:1024] + b"\xff\xff\xff\x7f" + data[1028:], ["NaN", "embedding.weight"]),
]


def test_a_damaged_or_other_file_is_refused_in_a_sentence(theirs, tmp_path):
    path, data = tmp_path / "model.bin", as_llmc_writes(theirs, 3)
    for change, words in DAMAGE:
        path.write_bytes(change(data))
        refused(path, path, *words)


OTHER_MODELS = [
    ({}, torch.float32, "positions = learned"),
    ({"name": "gpt2-debug", "tied_head": False}, torch.float32, "tied_head = True"),
    ({"name": "gpt2-debug", "ffn_dim": 384}, torch.float32, "ffn_dim = 512, unlike"),
    ({"name": "gpt2-debug", "ffn_dim": 512}, torch.float16, "--dtype fp32 or --dtype bf16"),
]


def test_another_model_than_gpt2_is_refused(tmp_path):
    for changes, dtype, rule in OTHER_MODELS:
        model = model_under("fp32", layers=1, kv_heads=4, **changes)
        with pytest.raises(UserError, match=rule):
            write_llmc(tmp_path / "model.bin", model.config, model.state_dict(), dtype)
    assert not (tmp_path / "model.bin").exists()
