"""nvidia-modelopt 0.47.0: MXFP4 rounds ties toward zero, and 0 to -0.

MX 6.3 and 754. `qtensor/mxfp4_tensor.py:50` compares with `>`; NVFP4 in the same folder adds one at the odd
bounds. Line 48: `(2 - sign) // 2` is 1 for a sign of 0.
"""

import torch
from modelopt.torch.quantization.qtensor import MXFP4QTensor

made, scale = MXFP4QTensor.quantize(torch.tensor([[6.0, 0.75, 1.75, 3.5] * 8]), 32)
print(made.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})[0, :4].tolist())  # due: 6, 1, 2, 4
print(hex(MXFP4QTensor.quantize(torch.zeros(1, 32), 32)[0]._quantized_data[0, 0].item()))  # due: 0x0
# prints:
#   [6.0, 0.5, 1.5, 3.0]
#   0x88
