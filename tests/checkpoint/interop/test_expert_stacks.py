"""Experts in stacks of MXFP4 blocks, as gpt-oss has them: the numbers that transformers makes of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoint.interop.models import ours_from, refused
from checkpoint.interop.test_huggingface import IDS, make
from narrowgauge.quantization import quantize
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.quantized_weights import dequantize

QWEN = ("qwen3_moe", {"moe_intermediate_size": 64, "norm_topk_prob": True})
MATRICES, PARTS = ("gate_up_proj", "down_proj"), ("blocks", "scales")


def wide(blocks, scales):
    """(E, N, K) as transformers decodes them, which turns each matrix round."""
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)


def random_stack(shape_ENK, seed):
    """Blocks and scales of a stack, of weights of a usual size."""
    E, N, K = shape_ENK
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(120, 125, (E, N, K // 32), dtype=torch.uint8, generator=generator)


def packed(folder, model):
    """Save a model of transformers with random blocks for its stacked experts, and return these by name."""
    model.save_pretrained(folder)
    plain = load_file(folder / "model.safetensors")
    prefix = "block_sparse_moe" if any("block_sparse_moe" in name for name in plain) else "mlp"
    kept = {name: t for name, t in plain.items() if ".experts." not in name or name.endswith("_bias")}
    stacks = {}
    for name, parameter in model.named_parameters():
        if name.endswith(MATRICES):
            E, *shape = parameter.shape
            N, K = reversed(shape) if model.config.model_type == "gpt_oss" else shape
            name = name.replace(".mlp.", f".{prefix}.")
            stacks[name + "_blocks"], stacks[name + "_scales"] = random_stack((E, N, K), len(stacks))
    save_file(kept | stacks, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return stacks


def of_layer(stacks, layer, matrix):
    return (next(t for n, t in stacks.items() if f".{layer}." in n and f"{matrix}_{x}" in n) for x in PARTS)


def test_every_byte_under_every_scale_is_transformers_number():
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).expand(1, 255, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    read, precision = dequantize({"weight_packed": blocks[0].flatten(-2), "weight_scale": scales[0]}, (1, 1))
    assert precision == "mxfp4"
    assert torch.equal(read.view(torch.int32), wide(blocks, scales)[0].contiguous().view(torch.int32))


@pytest.mark.parametrize(("family", "changes"), [("mixtral", {}), QWEN], ids=["mixtral", "qwen3"])
def test_a_mixture_computes_with_what_transformers_decodes(tmp_path, family, changes):
    theirs = make(family, **changes).eval()
    stacks = packed(tmp_path, theirs)
    for layer in range(theirs.config.num_hidden_layers):
        experts = theirs.model.layers[layer].mlp.experts
        for matrix in MATRICES:
            getattr(experts, matrix).data.copy_(wide(*of_layer(stacks, layer, matrix)))
    read = read_external_model(tmp_path)
    assert read.precisions == {"fp32", "mxfp4"}
    with torch.no_grad():
        torch.testing.assert_close(ours_from(read)(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)
    down = wide(*of_layer(stacks, 1, "down_proj"))
    for expert, w_NK in enumerate(down):
        assert torch.equal(read.tensors[f"blocks.1.experts.{expert}.down.weight"], w_NK)


def test_gpt_oss_is_refused_with_a_way_out_that_works(tmp_path):
    stacks = packed(tmp_path, make("gpt_oss"))
    refused(tmp_path, "attention sinks", "Mxfp4Config(dequantize=True)", "narrowgauge.convert")
    settings = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    for matrix in MATRICES:
        w_ENK = wide(*of_layer(stacks, 0, matrix))
        assert torch.equal(getattr(model.model.layers[0].mlp.experts, matrix).transpose(1, 2), w_ENK)
        # The recipe's own blocks are these: the first forward pass multiplies with the published numbers.
        assert torch.equal(quantize(w_ENK[0], "mxfp4", scale_rule="rceil").dequantize(), w_ENK[0])


OTHERS = [
    (lambda blocks, scales: (blocks[..., :8].contiguous(), scales), "blocks of shape"),
    (lambda blocks, scales: (blocks, scales[:, :8].contiguous()), "scales of shape"),
    (lambda blocks, scales: (blocks, None), "scales of shape None"),
    (lambda blocks, scales: (blocks, scales.float()), "cannot be decoded: packed codes have"),
    (lambda blocks, scales: (blocks, scales.fill_(255)), "holds a NaN"),
]
STACK = "model.layers.0.mlp.experts.down_proj"


def test_other_stacks_are_refused_in_a_sentence(tmp_path):
    packed(tmp_path, make(QWEN[0], **QWEN[1]))
    sound = load_file(tmp_path / "model.safetensors")
    for change, words in OTHERS:
        tensors = {name: t.clone() for name, t in sound.items()}
        blocks, scales = change(tensors.pop(f"{STACK}_blocks"), tensors.pop(f"{STACK}_scales"))
        changed = {f"{STACK}_blocks": blocks} | ({} if scales is None else {f"{STACK}_scales": scales})
        save_file(tensors | changed, tmp_path / "model.safetensors")
        refused(tmp_path, words)
    save_file(sound | {STACK: torch.ones(4, 64, 32)}, tmp_path / "model.safetensors")
    refused(tmp_path, f"tensor '{STACK}', for which")  # beside the blocks
