"""torchao 0.18.0: MX blocks under the scale code 0 are halved, or lost.

MX 6.3 and 5.4.1: code 0 is 2^-127. `mx_formats/mx_tensor.py:359` divides by 2^-126 and the reader
multiplies by 2^-127; under `RCEIL` the block is lost.
"""

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

kind, x = torch.float8_e4m3fn, torch.full((1, 32), 2.0**-120)
for mode in (ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL):
    scale, codes = to_mx(x, kind, 32, mode)
    print(scale.view(torch.uint8).item(), (to_dtype(codes, scale, kind, 32, torch.float32) / x)[0, 0].item())
# prints:
#   0 0.5
#   0 0.0
