"""A custom format.

Five facts define a format; all limits follow. Its name then stands wherever an element's name does.
"""

import torch

import narrowgauge as ng

e3m4 = ng.register_format(ng.Format("e3m4", 3, 4, 3, ng.Specials.IEEE))
x = torch.randn(64, 128)
for name in ("e4m3", "e3m4"):
    q = ng.quantize(x, {"element": name, "block": 32, "scale": "e8m0"})
    print(name, ng.format(name).max, (q.dequantize() - x).square().mean().sqrt())
