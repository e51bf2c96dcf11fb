"""nanoGPT as it is.

In a clone of nanoGPT (https://github.com/karpathy/nanoGPT): one line converts its model, and its own
optimizer trains it.
"""

import torch
from model import GPT, GPTConfig  # type: ignore[import-not-found]

import narrowgauge as ng

torch.manual_seed(0)
model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=128))
ng.convert(model, "fp8")
optimizer = model.configure_optimizers(0.1, 3e-3, (0.9, 0.95), "cpu")
text = torch.arange(33 * 8).reshape(8, 33) % 97
losses = []
for _ in range(8):
    _, loss = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)
