"""nvidia-modelopt 0.47.0: the scale code 255 reads as 2^128.

MX 5.4.1: the code is NaN; MX 5.1: so are all 32 values. A damaged or NaN block becomes large finite numbers
or infinity, which pass a check for NaN.

nvidia-modelopt 0.47.0, `qtensor/mxfp8_tensor.py:254` and `mxfp4_tensor.py:137`.
"""

import torch
from modelopt.torch.quantization.qtensor import MXFP8QTensor

made, scale = MXFP8QTensor.quantize(torch.ones(1, 32))
scale = torch.full_like(scale, 255)
print(made.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})[0, :2].tolist())  # due: nan
# prints:
#   [inf, inf]
