"""One thread a process, in this one and in all that it starts.

The tests are many processes on few cores, whose threads would wait for each other. tests/conftest.py imports
this before anything imports torch, for `make test` and a bare `pytest -n 2` alike. What is about threads sets
its own.
"""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ[_name] = "1"
