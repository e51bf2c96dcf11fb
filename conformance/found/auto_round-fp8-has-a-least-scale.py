"""auto-round 0.16.1: FP8 has a least scale of 4.4e-6.

`data_type/fp8.py:123` raises the scale to 1 / (448 x 512), "copy from vllm". Below a maximum of 1 / 512 a
tensor or row no longer reaches the top of E4M3; values below 6.8e-8 lose bits, and values below 4.3e-9
become zeros.
"""

import torch
from auto_round.data_type.fp8 import quant_fp8_sym

for factor in (1.0, 2.0**-26, 2.0**-30):
    x = torch.tensor([[1.0, 0.3, 0.07]]) * factor
    print([round(v, 3) for v in (quant_fp8_sym(x)[0] / x)[0].tolist()])  # due: the first line each time
# prints:
#   [1.0, 0.952, 1.02]
#   [1.143, 1.905, 0.0]
#   [0.0, 0.0, 0.0]
