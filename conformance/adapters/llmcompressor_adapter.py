"""llm-compressor: the scales of its weight observer, the codes of compressed-tensors."""

import torch
from compressed_tensors.quantization.lifecycle.forward import quantize as divide
from compressed_tensors_adapter import coded, scheme
from llmcompressor.observers import Observer
from llmcompressor.observers.helpers import flatten_for_calibration
from shared import installed, is_nvfp4

version = installed("llmcompressor")
REQUIRES = ["llmcompressor==0.14.0.1", "nvidia-ml-py"]


def quantize(x, cast):
    """Codes and scales after one look at the weight."""
    args, data = scheme(cast), torch.from_numpy(x)
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    observer.update_statistics_from_observed(flatten_for_calibration(data, "weight", args))
    found = observer.get_qparams()
    outer = found["global_scale"] if is_nvfp4(cast) else None
    values = divide(data, found["scale"], found["zero_point"], args, global_scale=outer)
    return coded(values, found["scale"], outer, cast)
