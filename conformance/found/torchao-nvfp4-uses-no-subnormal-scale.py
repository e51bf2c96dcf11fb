"""torchao 0.18.0: NVFP4 uses no subnormal scale of E4M3.

OFP8: E4M3 has the numbers 2^-9 to 7 x 2^-9 below 2^-6. `mx_formats/nvfp4_tensor.py:838` raises a block's
scale to 2^-6, so that a small block next to a large one uses the lowest codes only. Here a block of 0.011
has the scale 2^-9 and becomes 0.0117; it comes out as 0.0078.
"""

import torch
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

x = torch.zeros(1, 32)
x[0, 0], x[0, 16:] = 2688, 0.011
q = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
print(q.dequantize(torch.float32)[0, 16].item())  # due: 0.01171875
# prints:
#   0.0078125
