"""TransformerEngine d0067d0: the NVFP4 reference shrinks a tiny tensor.

`custom_recipes/reference_nvfp4.py:756` limits the encoding scale 2688 / amax to the largest float32, and
the reference's product multiplies by amax / 2688. Below an amax of 7.9e-36 the two are not inverses of each
other: 1e-37 comes out 81 times too small. The adapter in `conformance/adapters/` loads the module without a
GPU.
"""

import sys

sys.path.append("conformance/adapters")
import torch
from transformer_engine_adapter import nvfp4

quantizer = nvfp4.NVFP4QuantizerRef(dtype=None, columnwise=False, quant_tile_shape=(1, 16))
codes, scales, _, _, amax, *_ = quantizer._quantize(torch.full((1, 16), 1e-37))
value = 6 * scales.view(torch.float8_e4m3fn).float() * amax / (448 * 6)  # code 7
print(codes[0, 0].item() & 15, round((value / 1e-37).item(), 4))  # due: 7 and 1
# prints:
#   7 0.0123
