"""compressed-tensors 0.20.0: the scale code 255 reads as 2^128.

MX 5.4.1: the code is NaN; MX 5.1: so are all 32 values. A damaged or NaN block becomes large finite numbers
or infinity, which pass a check for NaN.

compressed-tensors 0.20.0, `compressors/mx_utils.py:44`.
"""

import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale

print(decompress_mx_scale(torch.tensor([255], dtype=torch.uint8)).tolist())  # due: nan
# prints:
#   [inf]
