"""NVFP4 as TransformerEngine's own reference computes it: the same codes and scales.

The digests below were taken from `NVFP4QuantizerRef` of NVIDIA/TransformerEngine at commit d0067d0da6cb
(transformer_engine/pytorch/custom_recipes/reference_nvfp4.py), run on a CPU with the inputs that are built
here: `_quantize_blockwise_reference` on tiles of 1x16 and 16x16, after `_apply_rht` with its 16 fixed signs
if the cast has it (there with inputs whose sums are exact, whatever their order); candidates are its 4over6
under E4M3 scales up to 256, an outer scale of rows its `row_scaled_nvfp4`. Left out is what is defined
otherwise here: the reference drops the sign of a negative zero.
"""

import hashlib

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import make_cast

ROWS, COLUMNS = 64, 96
MAE = {"cast": "nvfp4", "candidates": [6, 4], "choose": "mae"}
#: A cast, a kind of input and the digest.
DIGESTS = [
    ("nvfp4", "wide", "cc81db9e9cb859bc988c61ffef498448"),
    ("nvfp4", "largest", "3be032264b6c9136480be2ee9ff37770"),
    ("nvfp4", "zeros", "0ee0c7ac0933cd2c9de481994bf578c4"),
    ("nvfp4", "mixed", "dd173e58f1021f2de0953238a6531044"),
    ("nvfp4-2d", "mixed", "52b5143b7e9422446d782eece81b0f1d"),
    ({"cast": "nvfp4", "hadamard": 16}, "integers", "f6ffa82183cb7479c24c10fbacac9aff"),
    (MAE, "mixed", "057ca499c07d065c5cb449d8114d5870"),
    (MAE | {"choose": "mse"}, "wide", "1e033a228f3ad33ef49559b5e5000446"),
    (MAE | {"cast": "nvfp4-2d", "choose": "mse"}, "wide", "81ca1f9743e7ceaaf3b7a8ba047ee8bb"),
    ({"cast": "nvfp4", "tensor_scale": "row"}, "wide", "ed892b8b338c80a6c39442a052705aa3"),
    (MAE | {"tensor_scale": "row"}, "mixed", "bc4fb9eb269ee95862334f269067669f"),
]


def noise(seed):
    """Bell-shaped numbers from integers alone, the same everywhere: sums of four hashed 16-bit numbers."""
    i = np.arange(ROWS * COLUMNS * 4, dtype=np.uint64) + np.uint64(seed * 10**6 + 1)
    i = (i * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    i = (i * np.uint64(0xD1342543DE82EF95)) >> np.uint64(48)
    centred = i.astype(np.int64).reshape(4, ROWS, COLUMNS) - 2**15
    return torch.from_numpy(centred.sum(0).astype(np.float32) * np.float32(2.0**-15))


def inputs():
    x = noise(0)
    exponents = (noise(1) * 20).round()
    return {
        "wide": x * torch.exp2(exponents),
        "largest": x.sign() * torch.finfo(torch.float32).max,
        "zeros": torch.zeros(ROWS, COLUMNS),
        "mixed": torch.cat([x[:, :32], 0 * x[:, :32].abs(), x[:, 64:] * 2.0**-12], 1),
        "integers": (x * 8).round() + 0,  # + 0: no negative zeros
    }


def digest(packed, scales):
    """Of two FP4 codes a byte and one E4M3 scale for every 16 elements of every row."""
    assert packed.shape == (ROWS, COLUMNS // 2)
    assert scales.shape == (ROWS, COLUMNS // 16)
    data = packed.contiguous().numpy().tobytes() + scales.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:32]


@pytest.mark.parametrize(("table", "kind", "expected"), DIGESTS)
def test_codes_and_scales(table, kind, expected):
    q = ng.quantize(inputs()[kind], make_cast(table))
    scales = q.scale_codes.repeat_interleave(q.blocks.size[0], 0)
    assert digest(q.packed(), scales) == expected
