"""The backend of a recipe on a device, verified by one tiny GEMM of each kind that would be native.

The facts of a device determine which scaled GEMMs torch has for it (`recipes.choose_backend`). Whether this
torch, its libraries and this driver compute them correctly is tested by a GEMM of 128 x 256 and 256 x 128
quantized values, compared with the same values multiplied in float64. For each result

    |native - exact|  <=  2^-8 |exact| + 2^-10 sum_k |x_k w_k|

The first term is the rounding of the result to bf16, the second more than the loss of Hopper's fast
accumulation (14 bits). A misplaced scale or block is off by a factor. A GEMM that fails is emulated, with a
reason.
"""

from functools import cache

import torch

from narrowgauge.nn.gemm import native_product, quantized_operand
from narrowgauge.quantization import DEFAULT_CONTEXT, Cast, quantize_in_context
from narrowgauge.recipes import Backend, Recipe, choose_backend, device_facts, products_on
from narrowgauge.system.errors import UserError

TINY = (128, 256, 128)  # M, K, N


def verified_backend(recipe: Recipe, device: torch.device, requested: str = "auto") -> Backend:
    """`choose_backend` for a device that is present: native only if its GEMMs pass the test."""
    facts = device_facts(device)
    backend = choose_backend(recipe, facts, requested)
    if backend.name != "native" or device.type != "cuda":
        return backend
    for product in products_on(recipe, facts):
        failure = product.scheme and product_failure(*product.operands, device)
        if failure:
            reason = f"{product.scheme} fails its self-test on this {facts}: {failure}"
            if requested == "native":
                raise UserError(
                    f"recipe {recipe.name!r} cannot run natively here: {reason}; "
                    f"use --backend emulated (the same numbers, computed in {recipe.compute})"
                )
            return Backend("emulated", f"{reason}; the same numbers in {recipe.compute} GEMMs")
    return backend


@cache
def product_failure(
    x_cast: Cast, w_cast: Cast, device: torch.device, shape: tuple[int, int, int] = TINY
) -> str:
    """What is wrong with the native matmul of two casts on a device, as a clause; "" if nothing.

    `shape` is (M rows, K contracted columns, N columns).
    """
    M, K, N = shape
    generator = torch.Generator("cpu").manual_seed(0)
    operands, wide = [], []
    for cast, rows in ((x_cast, M), (w_cast, N)):
        x_RK = torch.empty(rows, K, dtype=torch.float32, device="cpu").normal_(generator=generator)
        x_RK *= torch.arange(1, K + 1, device="cpu")
        # A GEMM does not depend on how its values were made; random bits would come from torch's generator.
        plain = cast.to_nearest.having(hadamard=0, signs=(), correct="")
        q = quantize_in_context(x_RK.to(device), plain, -1, DEFAULT_CONTEXT)
        operands.append(quantized_operand(q, -1))
        wide.append(q.dequantize().double().cpu())
    try:
        native_MN = native_product(operands[0], operands[1], torch.bfloat16, fast=True).double().cpu()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error).strip().partition("\n")[0]
    exact_MN = wide[0] @ wide[1].T
    allowed_MN = exact_MN.abs() * 2.0**-8 + wide[0].abs() @ wide[1].abs().T * 2.0**-10
    wrong = ~((native_MN - exact_MN).abs() <= allowed_MN)
    return f"{int(wrong.sum())} of {wrong.numel()} results are wrong" if wrong.any() else ""
