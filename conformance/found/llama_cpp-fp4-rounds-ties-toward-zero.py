"""llama.cpp b11549: FP4 rounds ties toward zero, block scales round them up.

MX 6.3 and 754. In `ggml-quants.c`, `best_index_mxfp4` takes the first of two equally near values, for MXFP4
and NVFP4. In `ggml-impl.h`, `ggml_fp32_to_ue4m3` adds the next bit of the scale alone: 1.0625, halfway
between 1 and 1.125, becomes 1.125.

Due are 6, 1, 2, 4 under the scale 56; 6, 1, 2, 4 under 56; and 2688 for the value 1e13. From about 2^31
times the scale, all 16 distances are the same number in float32, and the first code is 0.
"""

import ctypes
from importlib.util import find_spec
import numpy as np

ggml = ctypes.CDLL(find_spec("xllamacpp.xllamacpp").origin)
for largest in (6.0, 6.375, 1e13):
    x = np.array([largest, 0.75, 1.75, 3.5] * 16, np.float32)
    block = np.zeros(36, np.uint8)
    ggml.quantize_row_nvfp4_ref(x.ctypes, block.ctypes, ctypes.c_int64(64))
    ggml.dequantize_row_nvfp4(block.ctypes, x.ctypes, ctypes.c_int64(64))
    print(largest, block[0], x[:4].tolist())
# prints:
#   6.0 56 [6.0, 0.5, 1.5, 3.0]
#   6.375 57 [6.75, 0.5625, 1.6875, 3.375]
#   10000000000000.0 126 [0.0, 0.0, 0.0, 0.0]
