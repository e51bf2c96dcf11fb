"""The operations of a step, fast on a GPU: one operation per file.

A file of this room has an operation's reference in plain torch (that of a cast is in `quantization`) and the
choice between reference and kernel. The kernel, with the function that launches it, is in the file of the
same name in `triton/`. It runs where `use_kernels` allows, the reference everywhere else; both pass the same
tests, on a CPU in Triton's interpreter.

A kernel matches its reference rounding for rounding: it is launched with enable_fp_fusion=False (multiply and
add are not fused), and divides with `tl.math.div_rn` (Triton's `/` is off by up to 2 ulp).
"""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.kernels.cast import emulate as emulate
    from narrowgauge.kernels.cast import quantize as quantize
    from narrowgauge.kernels.dispatch import choose_attention as choose_attention
    from narrowgauge.kernels.dispatch import choose_products as choose_products
    from narrowgauge.kernels.dispatch import has_kernels as has_kernels
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
