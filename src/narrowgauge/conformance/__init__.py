"""Does another library compute the same? Its quantizer, held against the conformance vectors.

`python -m narrowgauge.conformance MODULE` imports a module with one function:

    def quantize(x, cast):
        return codes, scales            # or codes, scales, tensor_scale

x             a float32 array (rows, columns) of NumPy; a product contracts columns, and blocks lie along them
cast          the facts of a cast, as in casts.json, with `input` (the format that x came in) and, where a
              vector has them, `random`, `scale_random`, `signs` and `amaxes`
codes         the bit pattern of each element, an integer for each, in the shape of x (with `hadamard` = n,
              columns are filled up to a multiple of n)
scales        of each block, row by row: integers (bit patterns) for the scales that have 8 bits, else numbers
tensor_scale  the second scale of NVFP4 and its like, where the cast has one

What the library does not have raises `NotImplementedError`. The vectors are in `conformance/` of a checkout.
"""

from narrowgauge.conformance.compare import Difference, Result, compare
from narrowgauge.conformance.vectors import Vector, read_vectors

__all__ = ["Difference", "Result", "Vector", "compare", "read_vectors"]
