"""nanochat as it is.

In a clone of nanochat (https://github.com/karpathy/nanochat). Its optimizer compiles itself; the stance
skips that for this small model.
"""

import torch
from nanochat.gpt import GPT, GPTConfig, Linear  # type: ignore[import-not-found]

import narrowgauge as ng

torch.manual_seed(0)
sizes = {"n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 64}
model = GPT(GPTConfig(sequence_len=32, vocab_size=128, **sizes))
model.init_weights()
ng.convert(model, "mxfp8", keep=["lm_head", "*gate*"], also=[Linear])
optimizer, losses = model.setup_optimizer(), []
text = torch.arange(33 * 8).reshape(8, 33) % 97
with torch.compiler.set_stance("force_eager"):
    for _ in range(8):
        loss = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
print(losses)
