"""gfloat 0.5.2: E8M0 returns a value that the format lacks.

MX 5.4.1: the least number is 2^-127. `round.py:63` returns 2^-128 as it is, and its code is NaN;
`encode_ndarray` returns a code of 64 bits.
"""

import gfloat
from gfloat.formats import format_info_ocp_e8m0 as e8m0

for value in (2.0**-127, 2.0**-128):
    rounded = gfloat.round_float(e8m0, value)
    print(rounded == value, gfloat.encode_float(e8m0, rounded))
# prints:
#   True 0
#   True 255
