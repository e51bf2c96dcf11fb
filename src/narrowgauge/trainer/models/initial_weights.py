"""Initial weights: a standard deviation for each role of a weight, or one for all.

One for all, `initial_std` > 0, is what published models use (0.02 since GPT-2). The matrices that write to
the residual stream are divided by sqrt(2 * layers), so that the sum of all 2 * layers writes starts with the
size of one (Radford et al., 2019). Nothing depends on the width, and small models pay for that. A stream that
starts at 0.02 is overrun within a few steps: Adam changes each weight by about the learning rate per step,
and a matrix whose columns all move one way soon writes more than the embedding holds. The gradient of
anything before a norm is proportional to 1 / rms(stream), so its norm is large until the stream has grown,
and spikes (Takase et al., arXiv 2312.16903, who recommend small sub-layers and a large embedding).

By role, `initial_std` = 0, for a stream of D features:

    embedding, positions    0.2                   well above what the first steps write
    head                    1 / sqrt(D)           unit features in, unit logits out
    both, where tied        0.5 / sqrt(D)         logits of the token that is read: sqrt(D) / 2
    matrices                1 / sqrt(fan_in)      unit features in, unit features out
    attention_out, down     half the embedding's / sqrt(fan_in): a block writes less than it reads

Embedding and matrices scale with the width as in muP (Yang et al., arXiv 2203.03466, table 8), whose head
would be 1 / D. nanochat and modded-nanogpt also have 1 / sqrt(D) for matrices, start the last line at exactly
0 and the head at 0 or 0.001. Here a small write trains as well as 0 and leaves no gradient of the first step
at zero, which gauges and probes of a new model read. A write larger than the embedding trains worse, as does
a head of 0 at these learning rates.

A tied model whose blocks write little starts by predicting the token that it reads: its norm scales that
token's embedding to length sqrt(D), so the inner product with itself is D times its deviation. The first
steps unlearn that. A larger deviation makes them harder; a smaller one lets the first writes overrun the
stream.

The factors were found at widths 64 to 768 (experiments/LOG.md). All weights share one learning
rate, where muP divides that of matrices by D.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from narrowgauge.trainer.models.config import ModelConfig
from narrowgauge.trainer.models.transformer import Transformer

_EMBEDDING = 0.2  # untied
_TIED = 0.5  # a share of the head's unit
_WRITES = 0.5  # of unit features, relative to the embedding


@torch.no_grad()
def initialize(model: Transformer, seed: int) -> None:
    """Set every parameter to its initial value."""
    model.tie_head()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    for name, value in starting_values(model.config, shapes, seed):
        parameters[name].copy_(value)


def starting_values(
    config: ModelConfig, shapes: Mapping[str, torch.Size], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """The initial value of each parameter, a function of only the configuration and the seed: fp32, CPU.

    `shapes` come from `named_parameters` of the full model, in order. Biases are 0, norm weights 1,
    matrices and embeddings normal(0, `initial_std_of`). The values are drawn in fp32 on the CPU, parameter by
    parameter, so that any device, any dtype and any number of devices starts from the same model.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, shape in shapes.items():
        module, role = name.rsplit(".", 1)
        if role == "bias":
            yield name, torch.zeros(shape, device="cpu")
        elif module.endswith("norm"):
            yield name, torch.ones(shape, device="cpu")
        else:
            std = initial_std_of(config, module, shape)
            yield name, torch.empty(shape, device="cpu").normal_(0.0, std, generator=generator)


def initial_std_of(config: ModelConfig, module: str, shape: torch.Size) -> float:
    """The standard deviation of the weight [out, in] of a module, by the module's name."""
    writes = module.endswith(("attention_out", "down"))
    if config.initial_std:
        return config.initial_std / (math.sqrt(2 * config.layers) if writes else 1)
    unit = 1 / math.sqrt(shape[1])
    embedding = _TIED / math.sqrt(config.dim) if config.tied_head else _EMBEDDING
    if module.endswith("embedding"):
        return embedding
    return _WRITES * embedding * unit if writes else unit
