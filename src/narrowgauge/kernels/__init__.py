"""The operations of a step, fast on a GPU: one operation a file.

A file of this room has an operation's reference in plain torch (that of a cast is in `quantization`) and the
choice between reference and kernel. The kernel is in the file of the same name in `triton/`. It runs where
`use_kernels` allows it, the reference everywhere else; both pass the same tests, on a CPU in Triton's
interpreter.

A kernel computes what its reference does, rounding for rounding: each is launched with enable_fp_fusion=False
(a product and a sum are not made one), and divides with `tl.math.div_rn` (Triton's `/` is 2 ulp off).
"""

from typing import TYPE_CHECKING

from narrowgauge.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.kernels.cast import emulate as emulate
    from narrowgauge.kernels.cast import quantize as quantize
    from narrowgauge.kernels.dispatch import choose_products as choose_products
    from narrowgauge.kernels.dispatch import has_kernels as has_kernels
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
