"""What several adapters need: versions, and two codes in a byte."""

import os
import subprocess
from importlib import metadata
from pathlib import Path

import numpy as np

POINTS_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def installed(distribution):
    """A function that says which version of a distribution is installed."""
    return lambda: metadata.version(distribution)


def checked_out(variable):
    """A function that says which commit the checkout has that an environment variable names."""

    def version():
        folder = Path(os.environ[variable])
        if (folder / "COMMIT").exists():  # a folder of files without a history
            return (folder / "COMMIT").read_text(encoding="utf-8").strip()
        words = ["git", "-C", str(folder), "rev-parse", "--short=7", "HEAD"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    return version


# The keys of a cast that these adapters read; a cast with another is refused.
READ = {"name", "element", "scale", "scale_rule", "block", "tensor_scale", "input", "saturates"}


def is_single(cast, elements, saturates=True):
    """Whether a cast converts single values to an element of these, in this mode of overflow."""
    return set(cast) <= READ and cast.get("saturates") is saturates and cast["element"] in elements


def is_mx(cast, elements, rules):
    """Whether a cast is MX in blocks of 32 along a row, with an element and a scale rule of these."""
    expected = set(cast) <= READ and cast["scale"] == "e8m0" and cast.get("block") == [1, 32]
    return expected and cast["element"] in elements and cast.get("scale_rule", "rceil") in rules


def is_nvfp4(cast, outer="tensor"):
    """Whether a cast is NVFP4 under a tensor scale (outer none: without one)."""
    kind = (cast["element"], cast["scale"], cast.get("block"), cast.get("tensor_scale"))
    return set(cast) <= READ and kind == ("e2m1", "e4m3", [1, 16], outer)


def is_fp8(cast, *blocks):
    """Whether a cast is E4M3 under float32 scales of these blocks (none: the tensor)."""
    expected = set(cast) <= READ and cast["scale"] == "fp32" and cast["element"] == "e4m3"
    return expected and cast.get("block") in blocks


def unpacked(codes):
    """Two codes of each byte, the low half first."""
    codes = np.asarray(codes)
    return np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1)


def packed(codes):
    """Two codes in each byte, the first in the low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def split_halves(packed, half):
    """Codes of ggml's blocks, which keep `half` codes in low halves of bytes and the next in high ones."""
    stored = packed.reshape(len(packed), -1, half)
    return np.concatenate([stored & 15, stored >> 4], -1).reshape(len(packed), -1)


def joined_halves(codes, half):
    """The bytes of such blocks."""
    parts = codes.reshape(len(codes), -1, 2, half)
    return (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(len(codes), -1).astype(np.uint8)


def e2m1_codes(values):
    """The codes of numbers that E2M1 holds."""
    values = np.asarray(values)
    near = np.abs(np.abs(values)[..., None] - POINTS_E2M1).argmin(-1)
    return near + 8 * np.signbit(values)
