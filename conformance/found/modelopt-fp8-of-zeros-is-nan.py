"""nvidia-modelopt 0.47.0: FP8 of zeros is NaN.

A tensor, row or block of zeros has the scale 0, and `qtensor/fp8_tensor.py:107` divides by it. OFP8: zero
is a number of E4M3. An expert that no token has reached, or a padded row, makes the layer NaN.
"""

import torch
from modelopt.torch.quantization.qtensor import FP8QTensor

made, scale = FP8QTensor.quantize(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), axis=0)
print(made._quantized_data.float().tolist())  # due: [224, 448], [0, 0]
# prints:
#   [[224.0, 448.0], [nan, nan]]
