"""Triton's version, by the name under which it is imported: its packages have several names.

torch's builds bring `triton` for NVIDIA, `pytorch-triton-rocm` or `triton-rocm` for AMD; they are not
interchangeable. It is not imported, which takes a second and would choose its interpreter or compiler.
"""

import re
from importlib.util import find_spec
from pathlib import Path


def triton_version() -> str:
    """The version, "unknown" if the module does not say; "" where there is none."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return ""
    found = re.search(r"""^__version__ = ['"]([^'"]+)""", Path(spec.origin).read_text(), re.MULTILINE)
    return found[1] if found else "unknown"
