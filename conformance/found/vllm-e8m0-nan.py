"""vLLM 0.33.0: the scale code 255 reads as 2^128.

MX 5.4.1: the code is NaN; MX 5.1: so are all 32 values. A damaged or NaN block becomes large finite numbers
or infinity, which pass a check for NaN.

vLLM 0.33.0, `utils/mxfp8_utils.py:237`; the adapter in `conformance/adapters/` loads the module without a
GPU.
"""

import sys

sys.path.append("conformance/adapters")
import torch
from vllm_adapter import mxfp8

codes, scale = torch.ones(1, 32).to(torch.float8_e4m3fn), torch.full((1, 1), 255, dtype=torch.uint8)
print(mxfp8.dequant_mxfp8_to_bf16(codes, scale)[0, :2].tolist())  # due: nan
# prints:
#   [inf, inf]
