"""transformers 5.24.0: the scale code 255 reads as 2^128.

MX 5.4.1: the code is NaN; MX 5.1: so are all 32 values. A damaged or NaN block becomes large finite numbers
or infinity, which pass a check for NaN.

transformers 5.24.0, `integrations/mxfp4.py:280`.
"""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

blocks = torch.full((1, 1, 1, 16), 0x11, dtype=torch.uint8)  # 32 codes of 0.5
scales = torch.tensor([[[255]]], dtype=torch.uint8)
print(convert_moe_packed_tensors(blocks, scales).flatten()[:2].tolist())  # due: nan
# prints:
#   [1.7014118346046923e+38, 1.7014118346046923e+38]
