"""gguf 0.19.0: MXFP4 rounds ties toward zero.

MX 6.3 and 754. `quants.py:681` takes the first of two equally near values. `quants.py:674` casts a negative
exponent to `uint8`, which wraps.
"""

import numpy as np
from gguf import GGMLQuantizationType, quants

kind = GGMLQuantizationType.MXFP4
x = np.array([[6.0, 0.75, 1.75, 3.5] * 8], np.float32)
print(quants.dequantize(quants.quantize(x, kind), kind)[0, :4].tolist())  # due: 6, 1, 2, 4
print(quants.quantize(np.full((1, 32), 2.0**-126, np.float32), kind)[0, 0])  # due: 0, the least scale
# prints:
#   [6.0, 0.5, 1.5, 3.0]
#   255
