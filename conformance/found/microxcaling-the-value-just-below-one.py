"""microxcaling 7bc4195: the value just below one half step rounds up.

754. `mx/elemwise_ops.py:68` computes floor(|x| + 0.5) in float32, and 0.49999997 + 0.5 is 1 there. With
`saturate_normals` an infinity stays one (line 161), also in E2M1, which has none.
"""

import os, sys

sys.path.append(os.environ["MICROXCALING"])
import numpy as np, torch
from mx.elemwise_ops import _quantize_elemwise
from mx.formats import ElemFormat

x = torch.tensor([np.nextafter(np.float32(0.25), np.float32(0)), 0.25, float("inf")])
print(
    _quantize_elemwise(x, ElemFormat.fp4_e2m1, round="even", saturate_normals=True).tolist()
)  # due: 0, 0, 6
# prints:
#   [0.5, 0.0, inf]
