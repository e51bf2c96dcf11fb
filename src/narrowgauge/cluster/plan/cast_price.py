"""The price of making the operands of a recipe's products, native or emulated: bytes and instructions.

A cast reads a tensor and writes codes (native) or the numbers that the codes stand for (emulated, in bf16;
in fp32 where bf16 does not hold them). On a GPU one kernel does it (`kernels/triton/cast.py`). It takes

    max( bytes / the memory's bandwidth,  instructions / the rate of the fp32 lanes )

    bytes           an element's source once, twice where a scale needs the largest magnitude first (a row, a
                    block of 128 x 128, NVFP4's tensor scale); what is written once, or along both axes
    instructions    an element's share of the busiest pipe of a multiprocessor, in lanes of fp32: `_LANES`

The instructions were counted in the machine code that Triton 3.7 makes of these kernels for sm_90 (4096 x
2048 bf16 elements, each pipe at the rate of the CUDA programming guide). Other GPUs are taken to need as
many. Where there is no kernel (CPUs, GPUs before Ampere, clamped outliers), plain operations move each
element dozens of times: their bytes are those that docs/performance.md counts.

An emulated product whose operands have a tensor's scale comes out in fp32, is scaled and rounded: 18 bytes a
result instead of 2 (`nn/gemm.py`).

Left out: the rank that clamped outliers ask for (a sort, on one multiprocessor), the launches and waits of
the host, the slope of a gradient estimator, and shards of tensors that several processes quantize together.
"""

from narrowgauge.bench.work import Operand
from narrowgauge.cluster.plan.cluster_spec import Cluster
from narrowgauge.nn import DTYPES
from narrowgauge.quantization import Cast

#: fp32 lanes an element, (along the contraction, across it): emulated numbers, codes.
_LANES = {
    "tensor": ((36, 36), (39, 51)),  # its amax comes with the tensor; else 17 more
    "row": ((46, 63), (44, 74)),
    "square": ((59, 70), (56, 80)),  # 128 x 128
    "block": ((40, 82), (47, 102)),  # MX, 1 x 128
    "block, hadamard": ((53, 50), (70, 67)),
    "nvfp4": ((57, 128), (70, 157)),
    "nvfp4, square": ((67, 84), (77, 103)),
    "nvfp4, hadamard": ((73, 82), (93, 103)),
}
_LANES_STOCHASTIC = 32  # more, of a random number an element
#: Bytes an element that plain operations move (docs/performance.md): emulated numbers, codes.
_PLAIN_BYTES = {"block": (124, 176), "nvfp4": (130, 185), "given": (110, 169)}
_SCALED_RESULT = 16  # bytes more a result


def cast_seconds(operand: Operand, elements: int, native: bool, cluster: Cluster, compute: str) -> float:
    """Seconds that a device of a cluster takes to make an operand.

    Args:
        operand: the operand.
        elements: the number of its elements, over all times that it is made.
        native: whether codes are made for the hardware to multiply.
        cluster: the device's figures.
        compute: the dtype of emulated numbers, where it holds them.
    """
    cast, source = operand.cast, DTYPES[operand.source].itemsize
    if not cast.is_scaled:  # a plain conversion
        return elements * (source + cast.element.bits / 8) / cluster.memory_bandwidth
    if not cluster.has_kernels or cast.outliers:
        kind = "nvfp4" if cast.scale == "e4m3" else "given" if _is_given(cast) else "block"
        return elements * _PLAIN_BYTES[kind][native] / cluster.memory_bandwidth
    reads = 2 if cast.scale == "e4m3" or (_is_given(cast) and cast.block is not None) else 1
    written = (
        cast.element.bits / 8 if native else DTYPES["fp32" if cast.has_wide_operand else compute].itemsize
    )
    writes = 2 if native and operand.is_shared else 1
    lanes = _LANES[_kind(cast)][native][operand.axis == 0]
    lanes += _LANES_STOCHASTIC if cast.rounding == "stochastic" else 0
    moving = (reads * source + writes * written) / cluster.memory_bandwidth
    return elements * max(moving, lanes / cluster.lane_rate)


def scaling_seconds(results: int, cluster: Cluster) -> float:
    """Seconds of applying a tensor's scale to the results of emulated products."""
    return results * _SCALED_RESULT / cluster.memory_bandwidth


def _is_given(cast: Cast) -> bool:
    """Whether a scale covers more elements than a tile of the kernel: a row, 128 x 128, or the tensor."""
    return cast.block is None or cast.block[1] == 0 or cast.block[0] == 128


def _kind(cast: Cast) -> str:
    """The row of `_LANES` that a cast belongs to."""
    if cast.scale == "e4m3":
        is_square = cast.block is not None and cast.block[0] > 1
        return "nvfp4, square" if is_square else "nvfp4, hadamard" if cast.hadamard else "nvfp4"
    if cast.block is None:
        return "tensor"
    if _is_given(cast):
        return "row" if cast.block[1] == 0 else "square"
    return "block, hadamard" if cast.hadamard else "block"
