"""Triton's kernels, imported for its interpreter or its compiler, if there is no GPU.

A kernel is what it was when its module was first imported: interpreted, or compiled for a GPU. Tests of
kernels run it, tests that count a step on an imagined GPU only tell its launch, in whatever order they come.
So tests/conftest.py imports all kernels here, before any of them. With NARROWGAUGE_COMPILED_FOR=cuda:90 they
are compiled for that GPU, and what was compiled is executed (`ptx`).
"""

import importlib
import os
import pkgutil
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

#: The GPU for which kernels are compiled; "" to interpret them.
COMPILED_FOR = os.environ.get("NARROWGAUGE_COMPILED_FOR", "")


def import_kernels() -> None:
    """Import the modules of `kernels.triton` if there is Triton, unless a GPU is to run them."""
    if (torch.cuda.is_available() and not COMPILED_FOR) or find_spec("triton") is None:
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "0" if COMPILED_FOR else "1"
    try:
        package = importlib.import_module("narrowgauge.kernels.triton")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def plain_operations() -> AbstractContextManager[Any]:
    """Use no kernels: every operation is its reference."""
    return patch.dict(os.environ, NARROWGAUGE_KERNELS="0")


@pytest.fixture
def device(monkeypatch):
    """The device that kernels run on: a GPU, or Triton's interpreter on the CPU. Triton reads the variable
    when a kernel is defined, at its first use; its own functions, such as the sum, when it is imported. The
    interpreter computes with numpy, which would warn of infinities and NaN."""
    triton = pytest.importorskip("triton", reason="torch came without Triton here")
    if torch.cuda.is_available() and not COMPILED_FOR:
        yield torch.device("cuda")
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that operations on a CPU's tensors launch kernels
    if COMPILED_FOR:
        from ptx.compiled import executing

        with executing(COMPILED_FOR):
            yield torch.device("cpu")
        return
    from triton.runtime.interpreter import InterpretedFunction

    for name, function in list(vars(triton.language).items()):
        if isinstance(function, triton.JITFunction):
            monkeypatch.setattr(triton.language, name, InterpretedFunction(function.fn))
    with np.errstate(all="ignore"):
        yield torch.device("cpu")
