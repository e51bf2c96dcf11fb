"""torchao 0.18.0: FP8 of a tensor below 1e-12 is zeros.

`float8/float8_utils.py:47` counts a largest magnitude below 1e-12 as 1e-12. TransformerEngine,
compressed-tensors and ModelOpt have no such floor; gradients of long sums reach it.
"""

import torch
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

x, kind = torch.full((2, 2), 1e-20), torch.float8_e4m3fn
scale = amax_to_scale(x.abs().max(), kind)
print((to_fp8_saturated(x * scale, kind).float() / scale / x)[0, 0].item())  # due: 1
# prints:
#   0.0
