"""Small models under recipes, and exports of them."""

import pytest
import torch

from narrowgauge.nn import convert, set_step
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.gguf_model import write_gguf_model
from narrowgauge.trainer.checkpoint.interop.huggingface import write_folder
from narrowgauge.trainer.checkpoint.interop.quantized_export import write_quantized
from narrowgauge.trainer.models import Transformer, initialize, model_config

SIZES = {"dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 128, "vocab_size": 160}


def model_under(recipe, steps=None, dtype=torch.float32, name="debug", **sizes):
    """A model whose weights have moved away from their initialization."""
    model = Transformer(model_config(name, **SIZES | sizes), dtype)
    initialize(model, 0)
    draw = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.data = (p.data + 0.1 * (p.ndim == 1)) * (1 + 0.3 * torch.randn(p.shape, generator=draw)).to(dtype)
    return in_step(convert(model, recipe), steps)


def in_step(model, steps):
    """The model in the step after some, whose passes its histories have seen; None: in no step."""
    for step in range(1, 1 + (steps or 0)):
        set_step(model, 0, step, 0)
        model(torch.arange(40)[None]).sum().backward()
    if steps is not None:
        set_step(model, 0, steps + 1, 0)
    return model


def weights_of(model):
    """Each weight once, in fp32."""
    names = dict(model.named_parameters(remove_duplicate=False))
    return {name: t.float() for name, t in model.state_dict().items() if name in names}


def export(to, folder, model, dtype=torch.float32, scales=None):
    """Write a model in a format, its unquantized weights in a dtype; returns the remarks."""
    settings = weights_of(model), None, dtype
    if to == "gguf":
        return write_gguf_model(folder / "model.gguf", model, *settings)
    if to == "hf":
        return write_folder(folder, model.config, *settings)
    return write_quantized(folder, model, *settings, None, scales, to)


def refused(path, *words):
    """A model that is not read, and the words of the sentence that says why."""
    with pytest.raises(UserError) as error:
        read_external_model(path)
    said = str(error.value)
    assert all(str(word) in said for word in words), said
    assert "\n" not in said


def ours_from(read):
    """The model of a folder or file that was read."""
    model = Transformer(read.config)
    model.load_state_dict(dict(read.tensors))
    return model.eval()
