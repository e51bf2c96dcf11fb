"""fouroversix dadfad6: NVFP4 does not saturate.

NVFP4's elements end at 6, so a value above saturates. A value may exceed 6 times its block's scale where
that scale is a small, coarse E4M3 number; `quantize/pytorch/reference.py:79` clamps to 7 half steps, and
the code 8 is -0: the largest values of the block are lost.
"""

import os, sys
from types import ModuleType

for name in ("", ".quantize", ".quantize.pytorch", ".kernels"):  # their __init__ needs a GPU
    sys.modules["fouroversix" + name] = module = ModuleType(name)
    module.__path__ = [os.environ["FOUROVERSIX"] + "/src/fouroversix" + name.replace(".", "/")]
import torch
from fouroversix.quantize.pytorch.reference import DataType, ScaleRule, quantize

x = torch.tensor([[2688.0, *[0.0] * 15, 0.0145, 0.01, *[0.0] * 14]])  # the second scale is 2^-9
given = dict(fp4_format=DataType.nvfp4, scale_rule=ScaleRule.static_6, use_blackwell_scale_layout=False)
print(quantize(x, block_scale_2d=False, **given)[0][0, 8].item() & 15)  # due: 7
# prints:
#   8
