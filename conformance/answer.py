"""Asks one library the questions of the matrix: `python conformance/answer.py ADAPTER < QUESTIONS > ANSWERS`.

It runs in the environment of the library, which needs NumPy and nothing of narrowgauge. A question is a line
of JSON; the answer is one too: what the library gave, that it has no such thing, or the exception that it
raised.
"""

import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np

SEED = 1234


def load(path):
    """The module of an adapter; what lies beside it can be imported."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(f"adapter_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(module, question):
    """The answer of a library to one question, as a dictionary of lists."""
    cast, asks = question["cast"], question["asks"]
    function = getattr(module, asks, None)
    if asks == "quantize" and function is None:
        function = getattr(module, "emulate", None)
    if function is None:
        return {"verdict": "is not there"}
    try:
        if asks == "dequantize":
            codes, scales = np.array(question["codes"], np.uint8), np.array(question["scales"], np.uint8)
            given = function(codes, scales.reshape(len(codes), -1), cast)
        else:
            x = np.array([float.fromhex(v) for v in question["x"]], np.float32).reshape(question["shape"])
            given = function(x, cast) if asks == "quantize" else function(x, cast, SEED)
    except NotImplementedError:
        return {"verdict": "is not there"}
    except Exception as error:  # of the library: part of the answer
        return {"verdict": "fails", "why": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    if given is None:
        return {"verdict": "is not there"}
    if not isinstance(given, tuple):
        return {"values": _texts(given)}
    names = ("codes", "scales", "tensor_scale")
    return {name: _texts(part) for name, part in zip(names, given, strict=False) if part is not None}


def _texts(numbers):
    """Whole numbers as they are, others as hexadecimal text, which keeps every bit."""
    array = np.asarray(numbers)
    if array.dtype.kind in "iu":
        return array.astype(np.int64).ravel().tolist()
    return [float(v).hex() for v in array.astype(np.float64).ravel()]


def main(path):
    """Answer every question of standard input."""
    out = os.fdopen(os.dup(1), "w")  # a library may print to stdout; answers go to a copy of it
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    module = load(path)
    print(json.dumps({"version": module.version()}), file=out, flush=True)
    for line in sys.stdin:
        with np.errstate(all="ignore"):
            print(json.dumps(answer(module, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
