"""narrowgauge itself: `python -m narrowgauge.conformance conformance/adapters/narrowgauge_adapter.py`."""

import torch

import narrowgauge as ng

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What one call of ng.quantize is not given, or does not return.
GIVEN = {"random", "scale_random", "signs", "amaxes", "compensate", "center"}


def version():
    """The version of the package."""
    return ng.__version__


def quantize(x, cast, **more):
    """Codes, scales and the tensor scale of `ng.quantize`."""
    if set(cast) & GIVEN or cast.get("signs") == "random" or cast.get("history"):
        raise NotImplementedError
    if "saturates" in cast:
        raise NotImplementedError
    table = {key: value for key, value in cast.items() if key not in ("name", "input", "block")}
    block = cast.get("block")
    table["block"] = "tensor" if block is None else block if block[1] else "row"
    q = ng.quantize(torch.from_numpy(x).to(DTYPES[cast["input"]]), table, **more)
    return q.codes, q.scales if q.scale_codes is None else q.scale_codes, q.tensor_scale


def stochastic(x, cast, seed):
    """Codes and scales, drawn."""
    return quantize(x, cast, rounding="stochastic", generator=torch.Generator().manual_seed(seed))
