"""A vision transformer.

Nothing is specific to language models.
"""

import torch
import transformers

import narrowgauge as ng

config = transformers.ViTConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
    image_size=32,
    patch_size=8,
)
model = transformers.ViTForImageClassification(config)
ng.convert(model, "mxfp8", keep="classifier")
images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
model(pixel_values=images, labels=labels).loss.backward()
print(ng.kept_layers(model))
