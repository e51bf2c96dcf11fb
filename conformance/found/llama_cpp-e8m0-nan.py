"""llama.cpp b11549 (the library in xllamacpp 2026.10.11549): the scale code 255 reads as 2^128.

MX 5.4.1: the code is NaN; MX 5.1: so are all 32 values. A damaged or NaN block becomes large finite numbers
or infinity, which pass a check for NaN.

llama.cpp b11549 (the library in xllamacpp 2026.10.11549), `ggml-impl.h`, `ggml_e8m0_to_fp32_half`.
"""

import ctypes
from importlib.util import find_spec
import numpy as np

ggml = ctypes.CDLL(find_spec("xllamacpp.xllamacpp").origin)
block, values = np.array([255] + [0x11] * 16, np.uint8), np.zeros(32, np.float32)
ggml.dequantize_row_mxfp4(block.ctypes, values.ctypes, ctypes.c_int64(32))
print(values[:2].tolist())  # due: nan
# prints:
#   [1.7014118346046923e+38, 1.7014118346046923e+38]
