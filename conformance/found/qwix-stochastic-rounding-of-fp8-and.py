"""qwix 0.1.8: stochastic rounding of FP8 and MX rounds to nearest.

`bwd_stochastic_rounding` of a rule makes a function of noise, which `quantize` takes.
`core/numerics.py:182` returns for a float type before noise is added silently; integers are drawn. 17 lies
between 16 and 18 of E4M3.
"""

import jax, jax.numpy as jnp
from qwix._src.core.qarray import HowToQuantize, quantize
from qwix._src.core.stochastic_rounding import get_noise_fn

noise = get_noise_fn("uniform", jax.random.key(0), (0, 1))
x = jnp.full((1, 4096), 17.0).at[0, 0].set(448.0)
for kind in ("int8", "float8_e4m3fn"):  # due: two values each
    made = quantize(x, HowToQuantize(qtype=kind, noise_fn=noise))
    print(kind, sorted(set(made.qvalue[0, 1:].astype(float).tolist())))
# prints:
#   int8 [4.0, 5.0]
#   float8_e4m3fn [16.0]
