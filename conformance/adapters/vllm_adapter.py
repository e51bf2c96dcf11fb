"""vLLM's references in PyTorch: NVFP4's emulation and MXFP8 on devices without a kernel.

    VLLM=FOLDER python conformance/matrix.py vllm

FOLDER holds `vllm/` of a checkout or of an unpacked wheel, and, without a history, a file COMMIT that names
the version. Only two files of the package are read, so that nothing of it is installed.
"""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import torch
from checkouts import folder, package
from shared import checked_out, e2m1_codes, is_mx, is_nvfp4, packed

ROOT = folder("VLLM", "vllm/model_executor/layers/quantization/utils")
version = checked_out("VLLM")


class Name:
    """What decorators of Triton ask for, on a machine that runs none of its kernels."""

    def __getattr__(self, name):
        return Name()

    def __call__(self, *given, **named):
        """The decorated function, or a decorator."""
        return given[0] if given and callable(given[0]) else Name()


package("vllm")
package("vllm.platforms", current_platform=SimpleNamespace(is_cuda_alike=lambda: False))
package("vllm.scalar_type", scalar_types=SimpleNamespace(float4_e2m1f=SimpleNamespace(max=lambda: 6.0)))
package("vllm.triton_utils", tl=Name(), triton=Name())
package("vllm.utils")
package("vllm.utils.torch_utils", direct_register_custom_op=lambda **named: None)
package("references", ROOT)
nvfp4 = import_module("references.nvfp4_emulation_utils")
mxfp8 = import_module("references.mxfp8_utils")


def quantize(x, cast):
    """Codes and scales; the tensor scale is given inverted there."""
    data = torch.from_numpy(x)
    if is_mx(cast, ["e4m3"], ["rceil"]):
        codes, scales = mxfp8._mxfp8_e4m3_quantize_torch(data)
        return codes.view(torch.uint8).numpy(), scales.numpy()
    if is_nvfp4(cast):
        inverse = 2688.0 / data.abs().max()
        values, scales = nvfp4.ref_nvfp4_quant(data, inverse, 16)
        return (
            e2m1_codes(values),
            scales.to(torch.float8_e4m3fn).view(torch.uint8).numpy(),
            1 / inverse.numpy(),
        )
    raise NotImplementedError


def dequantize(codes, scales, cast):
    """Values of stored codes: MXFP8 in bfloat16, NVFP4 under the tensor scale 1."""
    if is_mx(cast, ["e4m3"], ["rceil"]):
        stored = torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)
        return mxfp8.dequant_mxfp8_to_bf16(*stored).float().numpy()
    if not is_nvfp4(cast):
        raise NotImplementedError
    stored = torch.from_numpy(packed(codes)), torch.from_numpy(np.ascontiguousarray(scales))
    return nvfp4.dequantize_to_dtype(*stored, torch.tensor(1.0), torch.float32, 16, swizzle=False).numpy()
