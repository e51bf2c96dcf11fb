"""gguf 0.19.0: the scale code 255 reads as 2^128.

MX 5.4.1: the code is NaN; MX 5.1: so are all 32 values. A damaged or NaN block becomes large finite numbers
or infinity, which pass a check for NaN.

gguf 0.19.0, `quants.py:664`.
"""

import numpy as np
from gguf import GGMLQuantizationType, quants

block = np.array([[255] + [0x11] * 16], np.uint8)
print(quants.dequantize(block, GGMLQuantizationType.MXFP4)[0, :2].tolist())  # due: nan
# prints:
#   [1.7014118346046923e+38, 1.7014118346046923e+38]
