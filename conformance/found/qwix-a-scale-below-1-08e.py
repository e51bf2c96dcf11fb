"""qwix 0.1.8: a scale below 1.08e-19 counts as 1.

MX 6.3; the range of E8M0 ends at 2^-127. `core/qarray.py:561` replaces a scale below the square root of the
smallest normal float32, and the values become zeros. The last bit of its FP8 scales differs from the
reciprocal of max / amax too (line 558), which no specification settles.
"""

import jax.numpy as jnp
import qwix

x = jnp.full((1, 32), 2.0**-62)
made = qwix.quantize(x, "mxfp8", tiled_axes={1: 32})
print(made.scale[0, 0], qwix.dequantize(made)[0, 0] / x[0, 0])  # due: 2^-70 and 1
# prints:
#   1.0 0.0
