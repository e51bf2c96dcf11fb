"""auto-round 0.16.1: the scale code 255 reads as 2^128.

MX 5.4.1: the code is NaN; MX 5.1: so are all 32 values. A damaged or NaN block becomes large finite numbers
or infinity, which pass a check for NaN.

auto-round 0.16.1, `experimental/qmodules/mx.py:43`.
"""

import torch
from auto_round.experimental.qmodules.mx import get_fp_scale

print(get_fp_scale(torch.tensor([255], dtype=torch.uint8)).tolist())  # due: nan
# prints:
#   [inf]
