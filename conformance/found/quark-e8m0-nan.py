"""AMD Quark 0.13: the scale code 255 reads as 2^128.

MX 5.4.1: the code is NaN; MX 5.1: so are all 32 values. A damaged or NaN block becomes large finite numbers
or infinity, which pass a check for NaN.

AMD Quark 0.13, `kernel/mx/triton.py:861`, reads the code 0 wrong as well: as 0, where it is 2^-127.
"""

import torch
from quark.torch.kernel.mx.triton import upcast_from_mxfp_torch

codes = torch.ones(1, 32).to(torch.float8_e4m3fn)
for code in (0, 255):  # due: 5.877471754111438e-39 and nan
    scale = torch.tensor([[code]], dtype=torch.uint8)
    print(code, upcast_from_mxfp_torch(codes, scale, torch.float32, axis=-1)[0, 0].item())
# prints:
#   0 0.0
#   255 inf
