"""A mixture of experts of transformers.

Experts that are stacked in one parameter are layers as any other.
"""

import torch
import transformers

import narrowgauge as ng

config = transformers.MixtralConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=4,
)
model = transformers.MixtralForCausalLM(config)
ng.convert(model, "mxfp8", keep="lm_head")
tokens = torch.randint(128, (2, 16))
model(tokens, labels=tokens).loss.backward()
print(ng.audit(model))
