"""brevitas 0.13.4: MX has no block below 1e-10.

MX 6.3; MX 5.4.1 has scales down to 2^-127. `quant/base.py:101`: `scaling_min_val = 1e-10`.
"""

import torch
from brevitas.nn import QuantLinear
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight

layer = QuantLinear(32, 1, bias=False, weight_quant=MXFloat8e4m3Weight)
layer.weight.data = torch.full((1, 32), 2.0**-60)
print(layer.quant_weight().value[0, 0].item() * 2.0**60)  # due: 1.0
# prints:
#   0.0
