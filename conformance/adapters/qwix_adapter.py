"""qwix against the vectors: `python -m narrowgauge.conformance conformance/adapters/qwix_adapter.py`.

Written for qwix 0.1.8 (JAX). It has FP8 and MX under scales of a tensor, of rows, or of blocks of a row. Its
scales are in the dtype of the tensor, so that all inputs are given to it in float32.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import qwix
from qwix._src.core import qarray
from qwix._src.core.stochastic_rounding import get_noise_fn
from shared import installed, is_mx

version = installed("qwix")
REQUIRES = [
    "qwix==0.1.8",
    "jax==0.10.2",
    "jaxlib==0.10.2",
    "flax",
    "optax",
    "chex",
    "orbax-checkpoint",
    "opt_einsum",
    "etils",
    "msgpack",
    "tensorstore",
    "treescope",
    "absl-py",
    "toolz",
    "wrapt",
    "humanize",
    "nest-asyncio",
    "simplejson",
    "aiofiles",
]

FP8 = {
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e4m3fnuz": jnp.float8_e4m3fnuz,
    "e5m2fnuz": jnp.float8_e5m2fnuz,
}
MX = {"e4m3": "mxfp8", "e2m1": "mxfp4"}
READ = {"name", "element", "scale", "scale_rule", "block", "input"}


def quantize(x, cast, **more):
    """Codes and scales as qwix computes them."""
    if set(cast) - READ or cast.get("scale_rule", "rceil") != "rceil":
        raise NotImplementedError
    (rows, columns), width = cast.get("block") or (0, 0), x.shape[1]
    kinds = {"fp32": FP8, "e8m0": MX}.get(cast["scale"], {})
    if cast["element"] not in kinds or rows > 1:
        raise NotImplementedError
    if columns:
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % columns)))
    how = {"channelwise_axes": [0] if rows == 1 else [], "tiled_axes": {1: columns} if columns else {}}
    made = qarray.quantize(jnp.asarray(x), qarray.HowToQuantize(qtype=kinds[cast["element"]], **how, **more))
    codes = np.asarray(made.qvalue).view(np.uint8)[:, :width]
    scales = np.asarray(made.scale, np.float32)
    if cast["scale"] == "e8m0":
        return codes, (scales.view(np.uint32) >> 23).astype(np.uint8)
    return codes, scales


def dequantize(codes, scales, cast):
    """Values of stored codes, with scales of E8M0 as JAX converts them to float32."""
    if not is_mx(cast, MX, ["rceil"]):
        raise NotImplementedError
    kind = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}[cast["element"]]
    factors = jnp.asarray(scales.view(ml_dtypes.float8_e8m0fnu)).astype(jnp.float32)
    array = qwix.QArray(jnp.asarray(codes.view(kind)), factors, qtype=MX[cast["element"]])
    return np.asarray(qwix.dequantize(array))


def stochastic(x, cast, seed):
    """Values with the noise that its rules of training hand to `quantize`."""
    noise = get_noise_fn("uniform", jax.random.key(seed), (0, 1))
    return quantize(x, cast, noise_fn=noise)
