"""The work of a GPU for one of torch's operations: kernels, bytes, FLOPs; by the operation's name.

By default an operation reads each of its tensors and writes each of its results once, in one kernel. Views do
nothing. The rules below list the exceptions. A tensor counts the bytes of its storage that it shows, so
an expanded tensor is read once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.system.torch_compat import is_view_operation, operation_name

#: Operations that launch nothing: they allocate memory, or view it differently.
_FREE = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
    | {"lift_fresh_copy", "_unsafe_view", "set_", "resize_", "record_stream", "is_same_size"}
    | {"_local_scalar_dense"}
)
#: Collectives: work of the network, not of the device.
_COLLECTIVES = frozenset(
    {"_allgather_base_", "allgather_", "_reduce_scatter_base_", "allreduce_", "broadcast_", "barrier"}
)
#: Operations that write but read only scalars from the host.
_FILLS = frozenset(
    {"fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros"}
    | {"new_ones", "new_full", "arange", "rand", "randn", "scalar_tensor"}
)
#: The number of kernels of an operation if it is not one: torch's CUDA implementations, 2.13.
_KERNELS = {
    "embedding_dense_backward": 9,
    "kthvalue": 12,
    "sort": 10,
    "topk": 10,
    "bincount": 4,
    "index_put_": 6,
    "linalg_vector_norm": 2,
}
_PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "_scaled_mm_v2": 0, "addmm": 1, "baddbmm": 1}  # first factor
_UPDATED_TENSORS = 36  # of torch's fused update, in one kernel
_UPDATED_ELEMENTS = 320 * 65536


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an operation on a GPU.

    `kind` is the format that the matrix units multiply, `lanes` the instructions of a kernel limited by them.
    """

    bytes: int
    flops: float = 0.0
    kind: str = ""
    launches: int = 1
    lanes: float = 0.0


def cost_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Cost | None:
    """The cost of an operation with its result; None if the GPU does nothing."""
    name = operation_name(func)
    results = _on_gpu(out)
    inputs = _on_gpu((args, {k: v for k, v in kwargs.items() if k != "out"}))
    if name in _FREE | _COLLECTIVES or not (results or inputs) or is_view_operation(func):
        return None
    if name in _PRODUCTS:
        return _product(name, args, inputs, results)
    if name == "_fused_adamw_":
        elements = [t.numel() for t in args[0]]
        launches = -(-len(elements) // _UPDATED_TENSORS) + sum(n // _UPDATED_ELEMENTS for n in elements)
        return Cost(28 * sum(elements), launches=max(1, launches))  # w, m, v read and written, g read
    return Cost(_moved(name, args, kwargs, inputs, results), launches=_KERNELS.get(name, 1))


def _moved(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> int:
    """Bytes read and written."""
    if name in _FILLS:
        return sum(map(shown_bytes, results))
    if name == "copy_":
        return shown_bytes(inputs[-1]) + shown_bytes(results[0])
    if name == "all_gather_copy_in":  # FSDP2: copies shards into the send buffer
        return 2 * sum(map(shown_bytes, _on_gpu(args[0])))
    if name in ("split_with_sizes_copy", "chunk_cat"):  # FSDP2: from the gathered buffer, to the summed one
        return sum(map(shown_bytes, _on_gpu((args[0], kwargs["out"]))))
    if name == "embedding":
        return 2 * shown_bytes(results[0])
    if name == "embedding_dense_backward":
        return 2 * shown_bytes(inputs[0]) + shown_bytes(results[0])
    if name == "index_add_":  # the rows that are added, and those that they are added to
        return 3 * shown_bytes(inputs[-1]) + shown_bytes(inputs[1])
    if name in ("index_select", "gather", "index"):
        return 2 * shown_bytes(results[0]) + shown_bytes(inputs[-1])
    return sum(map(shown_bytes, inputs)) + sum(map(shown_bytes, results))


def _product(
    name: str, args: Sequence[Any], inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> Cost:
    a, b = args[_PRODUCTS[name]], args[_PRODUCTS[name] + 1]
    flops, kind = 2.0 * a.numel() * b.shape[-1], "bf16" if a.element_size() == 2 else "fp32"
    if name.startswith("_scaled_mm"):
        scales = args[2] if isinstance(args[2], (list, tuple)) else [args[2]]
        kind = "fp8" if scales[0].numel() == 1 else "fp8-row"
        if scales[0].numel() > 1 and scales[0].numel() != a.shape[0]:
            kind = "fp8-block"
        if a.dtype == torch.float4_e2m1fn_x2:  # two values per byte, for the FP4 unit
            flops, kind = 2 * flops, "fp4"
        elif scales[0].dtype == torch.float8_e8m0fnu:
            kind = "mxfp8"
    return Cost(sum(map(shown_bytes, inputs)) + sum(map(shown_bytes, results)), flops, kind)


def shown_bytes(x: torch.Tensor) -> int:
    """The bytes of its storage that a tensor shows."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _on_gpu(tree: Any) -> list[torch.Tensor]:
    """The meta tensors among an operation's results or arguments, which lists and dictionaries may hold."""
    # a plan calls this for thousands of operations, and torch's pytree would flatten each
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.is_meta else []
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [t for branch in branches for t in _on_gpu(branch)]
