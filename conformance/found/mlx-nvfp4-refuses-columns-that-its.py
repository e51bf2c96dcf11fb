"""mlx 0.32.4: NVFP4 refuses columns that its documentation allows.

The documentation asks for a last dimension divisible by the group size, 16.
"""

import mlx.core as mx

try:
    mx.quantize(mx.ones((3, 16)), mode="nvfp4")
except ValueError as error:
    print(error)
# prints:
#   [reshape] Cannot reshape array of size 48 into shape (1,4,8).
