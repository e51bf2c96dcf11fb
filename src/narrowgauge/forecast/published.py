"""What published scaling laws of precision say of a recipe, in nats per token.

    Kumar et al. 2024, arXiv 2411.04330, appendix K
        A (N e)^-alpha - A N^-alpha,      e = (1 - exp(-P_w / gamma_w)) (1 - exp(-P_a / gamma_a)), P bits
    Sun et al. 2025, arXiv 2501.02423, table 2
        (D^beta / N^alpha) log2 B / (gamma (E + 1/2)^delta (M + 1/2)^nu)        blocks of B; E exponent bits,
                                                                                M mantissa bits
    Chen et al. 2025, arXiv 2505.14302, table 1 ("QAT law"): 4-bit weights and activations in groups of G
        k D^gamma_D (log2 G)^gamma_G / N^gamma_N
    Panferov et al. 2025, arXiv 2505.14669 ("Quartet"), constants of its notebook
        L(N e_N, D e_D) - L(N, D),      L = (A / N^alpha + B / D^beta)^gamma + E

Each was fitted to runs of its authors: integers to 1.7 billion parameters, floats to 679 million, 4 bits to
595 million, MXFP4 to 200 million. All but Quartet's describe the forward pass alone. None is fitted here;
Quartet's L is also the law of the loss that turns percent into nats and gaps into tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.quantization import Cast
from narrowgauge.recipes import Recipe

LOSS_LAW = "Quartet's law of the loss, arXiv 2505.14669 (C4, 30 to 800 million parameters)"
_A, _ALPHA, _B, _BETA, _E, _GAMMA = 127444.685, 0.57852, 465834.31, 0.538877, 1.340846, 0.276416
_E_N, _E_D = 0.64516, 0.89347  # 4-bit forward by QuEST, backward by stochastic rounding
_WIDE = 16


def loss_of(params: float, tokens: float) -> float:
    """The loss of a bf16 run in nats per token, by Quartet's law.

    >>> round(loss_of(30.5e6, 3e9), 2)
    3.21
    """
    return float((_A / params**_ALPHA + _B / tokens**_BETA) ** _GAMMA + _E)


def tokens_for(params: float, loss: float) -> float:
    """The tokens at which a bf16 run has a loss; infinite below what this size ever reaches.

    >>> round(tokens_for(1e8, loss_of(1e8, 1e10)) / 1e10, 6)
    1.0
    """
    of_data = max(loss - _E, 0.0) ** (1 / _GAMMA) - _A / params**_ALPHA
    return (_B / of_data) ** (1 / _BETA) if of_data > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Operands:
    """The forward GEMM as published laws see it: bits, exponent and mantissa of elements; sizes of blocks."""

    weight_bits: int
    input_bits: int
    exponent_bits: int
    mantissa_bits: int
    block: float


def operands_of(recipe: Recipe, params: float) -> Operands:
    """The forward operands of a recipe; a scale of a row or tensor has as many elements as the width."""
    x, w = recipe.casts["fprop.x"], recipe.casts["fprop.w"]
    element = min((x.element, w.element), key=lambda e: e.bits)
    width = max(128.0, math.sqrt(params / 100))  # about 12 L d^2 with d = 128 L / 10
    block = max(_elements(cast, width) for cast in (x, w))
    bits = min(_WIDE, w.element.bits), min(_WIDE, x.element.bits)
    return Operands(*bits, element.exponent_bits, element.mantissa_bits, block)


def _elements(cast: Cast, width: float) -> float:
    if cast.block is None or not cast.block[1]:
        return width
    return float(cast.block[1])


def published_laws(recipe: Recipe, params: float, tokens: float) -> Mapping[str, float | None]:
    """The gap in nats by each published law; None where a law does not describe the recipe."""
    o = operands_of(recipe, params)
    is_wide = min(o.weight_bits, o.input_bits) >= _WIDE
    return {
        "Kumar 2024": None if is_wide else kumar(o.weight_bits, o.input_bits, params),
        "Sun 2025": None if is_wide or o.exponent_bits < 1 else sun(o, params, tokens),
        "QAT law 2025": _qat(o, params, tokens),
        "Quartet 2025": quartet(params, tokens) if o.weight_bits == o.input_bits == 4 else None,
    }


def kumar(weight_bits: float, input_bits: float, params: float) -> float:
    """The law of Kumar et al. for integers.

    >>> round(kumar(4, 4, 30.48e6), 3)
    0.198
    """
    wide = 4.299e3 * params**-0.4965
    share = -math.expm1(-weight_bits / 2.6745) * -math.expm1(-input_bits / 2.2102)
    return float(wide * (share**-0.4965 - 1))


def sun(o: Operands, params: float, tokens: float) -> float:
    """The law of Sun et al. for floats.

    >>> round(sun(Operands(4, 4, 2, 1, 16), 200e6, 20e9), 3)
    0.013
    """
    fine = 11334.52 * (o.exponent_bits + 0.5) ** 3.1926 * (o.mantissa_bits + 0.5) ** 2.9543
    return float(tokens**0.5162 / params**0.2368 * math.log2(o.block) / fine)


_QAT = {
    (4, 4): (0.1582, 0.2186, 0.0745, 0.7779),
    (4, 16): (0.2522, 0.3589, 0.1610, 0.3533),
    (16, 4): (0.1004, 0.1816, 0.0331, 0.9812),
}


def _qat(o: Operands, params: float, tokens: float) -> float | None:
    constants = _QAT.get((o.weight_bits, o.input_bits))
    if constants is None:
        return None
    k, by_size, by_tokens, by_group = constants
    return float(k * tokens**by_tokens * math.log2(o.block) ** by_group / params**by_size)


def quartet(params: float, tokens: float) -> float:
    """Quartet's law with its own efficiencies.

    >>> round(quartet(200e6, 20e9), 3)
    0.072
    """
    return loss_of(params * _E_N, tokens * _E_D) - loss_of(params, tokens)
