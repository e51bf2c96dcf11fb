"""Files of other tools under the names that the pages use, as a reader would have them."""

from pathlib import Path

from narrowgauge.exchange import write_recipe
from narrowgauge.recipes import recipe

FILES = {
    "training.py": ("te", "fp8"),
    "precision.yaml": ("megatron", "mxfp8"),
    "nvfp4.yaml": ("modelopt", "modelopt-nvfp4-default"),
    "float8.py": ("torchao", "fp8"),
}


def write_files(folder: Path) -> None:
    """Write each file with a shipped recipe; a model has 32 blocks."""
    for name, (tool, shipped) in FILES.items():
        (folder / name).write_text(write_recipe(recipe(shipped), tool, 32), encoding="utf-8")
