"""Does another library compute the same? Compares its quantizer with the conformance vectors.

`python -m narrowgauge.conformance MODULE` imports a module with one function:

    def quantize(x, cast):
        return codes, scales            # or codes, scales, tensor_scale

x             a NumPy float32 array (rows, columns); a GEMM contracts columns, and blocks lie along them
cast          the keys of a cast, as in casts.json, with `input` (the original format of x) and, if the vector
              has them, `random`, `scale_random`, `signs` and `amaxes`
codes         the bit pattern of each element, as integers in the shape of x (with `hadamard` = n, columns are
              padded to a multiple of n)
scales        one per block, row by row: integers (bit patterns) for 8-bit scales, floats otherwise
tensor_scale  the outer scale of NVFP4 and similar casts, where the cast has one

Raise `NotImplementedError` for a cast that the library does not have. The vectors are in `conformance/` of a
checkout.
"""

from narrowgauge.conformance.compare import Difference, Result, compare
from narrowgauge.conformance.vectors import Vector, read_vectors

__all__ = ["Difference", "Result", "Vector", "compare", "read_vectors"]
