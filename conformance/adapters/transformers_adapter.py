"""transformers' own MXFP4, as it reads gpt-oss: stored codes only, its quantizer is a kernel for GPUs."""

import numpy as np
import torch
from shared import installed, is_mx, packed
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

version = installed("transformers")
REQUIRES = ["transformers==5.24.0"]


def dequantize(codes, scales, cast):
    """The experts' weights in float32; the function turns the two axes of a matrix."""
    if not is_mx(cast, ["e2m1"], ["floor"]):
        raise NotImplementedError
    blocks = torch.from_numpy(packed(codes).reshape(1, len(codes), -1, 16))
    turned = convert_moe_packed_tensors(blocks, torch.from_numpy(scales)[None], dtype=torch.float32)
    return np.ascontiguousarray(turned[0].T.numpy())
