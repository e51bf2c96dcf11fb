"""Reads the conformance vectors from their files: tensors as arrays, contracted along their columns."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowgauge.system.errors import UserError

Array = NDArray[Any]
# Hex digits of a code, and how the bits of its format are read; all other formats use bytes.
_WIDE = {"fp32": (8, ">u4"), "bf16": (4, ">u2"), "fp16": (4, ">u2")}
FOLDER = Path(__file__).parents[3] / "conformance"  # of a checkout


@dataclass(frozen=True, slots=True)
class Vector:
    """One input and its expected result."""

    name: str  # its name in the file
    input: str  # the name of its tensor
    cast: Mapping[str, Any]  # the keys of the cast, and other given values
    x: Array  # the values, float32 (rows, columns), contracted along columns
    codes: Array  # the bit patterns of the elements, in the shape of x; wider where a transform pads columns
    # the bit patterns of the scales, (blocks of rows, blocks of columns), in the scale's format
    scales: Array
    tensor_scale: Array | None  # the bits of the outer scale (or of one per row) in fp32; None without one


def read_vectors(folder: Path = FOLDER) -> Iterator[Vector]:
    """Yield the vectors of all casts that have scales.

    Raises:
        UserError: The folder does not contain them.
    """
    try:
        inputs, casts = (
            json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("inputs", "casts")
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"no conformance vectors in {folder}: {error}; name the folder `conformance` of a checkout by "
            "--vectors"
        ) from None
    for vector in casts["vectors"]:
        if "scales" in vector:
            yield _read(vector, inputs["inputs"][vector["input"]])


def _read(vector: Mapping[str, Any], stored: Mapping[str, Any]) -> Vector:
    x = values(bits(stored["codes"], stored["format"]), stored["format"]).reshape(stored["shape"])
    facts = dict(vector["cast"]) | {"input": stored["format"]}
    rows, columns = facts.get("block") or (0, 0)
    is_turned = vector["axis"] == 0
    # A transform pads the contraction axis with zeros to a multiple of its size.
    codes = bits(vector["codes"], "").reshape((-1, x.shape[1]) if is_turned else (x.shape[0], -1))
    shape = codes.T.shape if is_turned else codes.shape
    grid = (-(-shape[0] // (rows or shape[0])), -(-shape[1] // (columns or shape[1])))
    scales = bits(vector["scales"], facts["scale"])
    scales = scales.reshape(grid[::-1]).T if is_turned else scales.reshape(grid)
    for key in ("signs", "amaxes"):
        facts |= {key: vector[key]} if key in vector else {}
    if vector.get("random"):
        facts["random"] = _drawn(vector["random"]).reshape(x.shape[0], -1)  # as wide as the padded tensor
    if "scale_random" in vector:
        facts["scale_random"] = _drawn(vector["scale_random"])
    second = bits(vector["tensor_scale"], "fp32") if "tensor_scale" in vector else None
    x, codes = (x.T, codes.T) if is_turned else (x, codes)
    return Vector(vector["name"], vector["input"], facts, x, codes, scales, second)


def _drawn(text: str) -> Array:
    """Random integers, six hex digits for each 24 bits."""
    return np.array([int(text[i : i + 6], 16) for i in range(0, len(text), 6)])


def bits(text: str, format: str) -> Array:
    """Parse bit patterns from hex, most significant digit first."""
    digits, dtype = _WIDE.get(format, (2, ">u1"))
    assert len(text) % digits == 0
    return np.frombuffer(bytes.fromhex(text), dtype).astype(np.uint32)


def values(codes: Array, format: str) -> Array:
    """Decode wide formats to float32."""
    if format == "fp16":
        return codes.astype(np.uint16).view(np.float16).astype(np.float32)
    return (codes << (16 if format == "bf16" else 0)).astype(np.uint32).view(np.float32)
