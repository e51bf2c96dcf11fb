"""A custom recipe.

A dictionary with the keys of a recipe's file. The text of the recipe carries a custom format, so its runs
resume anywhere.
"""

import torch

import narrowgauge as ng

ng.register_format(ng.Format("e3m4", 3, 4, 3, ng.Specials.IEEE))
block = {"element": "e3m4", "block": 32, "scale": "e8m0"}
recipe = ng.Recipe.from_dict(
    {"name": "mine", "fprop": block, "dgrad": "mxfp8", "wgrad": "bf16", "keep": {"modules": ["2"]}}
)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
ng.convert(model, recipe)
print(ng.kept_layers(model), model(torch.randn(4, 64)).shape)
print(recipe.text)
