"""brevitas 0.13.4: MXINT8 halves what lies above a power of two.

MX 6.3: the largest power of two of INT8 is 1 (code 64), so the scale of a block with 1.9 is 1 and the code
round(1.9 x 64) = 122. The quantizer divides the floored maximum by 128 (`core/scaling/int_scaling.py:58`),
and 1.9 saturates to 127 / 128.
"""

import torch
from brevitas.nn import QuantLinear
from brevitas.quant.mx_quant_ocp import MXInt8Weight

layer = QuantLinear(32, 1, bias=False, weight_quant=MXInt8Weight)
layer.weight.data = torch.tensor([[1.9, 1.5, 1.0, 0.5] * 8])
print(layer.quant_weight().value[0, :4].tolist())  # due: 1.90625, 1.5, 1.0, 0.5
# prints:
#   [0.9921875, 0.9921875, 0.9921875, 0.5]
