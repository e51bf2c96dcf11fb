"""The private, renamed and experimental torch names that this package uses, each with its reason.

The rest of the package imports them from here (`test_house.py` checks it), so that a new torch version can
break only this file. `test_torch_compat.py` tests those whose users would not show a change.

CI has torch 2.13; `pyproject.toml` allows 2.11 and later. Comments note known differences between versions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import ScalingType as ScalingType
from torch.nn.functional import SwizzleType as SwizzleType
from torch.nn.functional import scaled_mm as scaled_mm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# TorchDispatchMode: the documented way to observe every operation ("Extending PyTorch"), in a private module.
# is_in_torch_dispatch_mode: shows whether such a mode is active; no public function does.
# tree_*: traverse an operation's arguments, which are nested lists and dicts; there is no public name.
# ScalingType, SwizzleType, scaled_mm: public but recent: kernels are still added and their conditions change.

T = TypeVar("T", bound=torch.Tensor)

# Collectives on one tensor. 2.13 renamed them and warns about the names of 2.11 and 2.12.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

# Copies many tensors in few GPU launches: (destinations, sources), two lists.
copy_each: Callable[..., Any] = torch._foreach_copy_


class Wrapper(torch.Tensor):
    """The base of tensors without memory of their own, whose operations all reach `__torch_dispatch__`."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # the public one wraps every result

    def __init__(self, *_: object) -> None:
        """Nothing more than `__new__` has made."""


def wrapper_subclass(
    cls: type[T], shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> T:
    """A tensor of a subclass, with a shape, strides, a dtype and a device but no memory.

    `torch.Tensor._make_wrapper_subclass` is what the documented examples of wrapper subclasses call; there is
    no public name.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)


def local_tensor(x: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, as the same object; any other tensor unchanged.

    `DTensor.to_local()` returns a new object, without the attributes and methods set on this one, and
    autograd records it. A write through the DTensor does not raise this tensor's version (`version_of`); a
    write through `to_local()` does.
    """
    return x._local_tensor if isinstance(x, DTensor) else x


def as_shard(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of the same shards as another, whose local tensor is this very object.

    `DTensor.from_local` takes a view of it. FSDP2 makes its shards the same way.
    """
    return DTensor(local, like._spec, requires_grad=False)


def norm_each(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The vector norm of each tensor, computed in a dtype; on a GPU in a few launches."""
    return list(torch._foreach_norm(list(tensors), order, dtype)) if tensors else []


def scale_each(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by a 0-dim tensor, in place; on a GPU in a few launches."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


@contextmanager
def not_strict() -> Iterator[None]:
    """Allow operations that torch refuses as nondeterministic, where the part that is used repeats."""
    if torch.compiler.is_compiling() or torch.get_deterministic_debug_mode() == 0:
        yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def reshaped(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor with another shape in the same memory, which autograd does not treat as a view.

    `torch.nn.Linear` ends in the same operation. FSDP2 warns about modules that return views.
    """
    return torch.ops.aten._unsafe_view(x, shape)


def compiled_as_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` that rounds as eager code does.

    By default torch's compiler drops a rounding to bf16 that is read back at once (`x.bfloat16().float()`),
    and on a GPU it divides approximately. Options of a single call leave everything else that a process
    compiles alone. Their names come from `torch._inductor.config`; names that this torch lacks are left
    out.
    """
    known = import_module("torch._inductor").list_options()
    wanted = ("emulate_precision_casts", "eager_numerics.division_rounding")
    return torch.compile(function, options={name: True for name in wanted if name in known})


def version_of(x: torch.Tensor) -> int:
    """The number of in-place writes to a tensor, shared by its views and base; -1 in inference mode.

    Autograd checks saved tensors by it. There is no public name.
    """
    return -1 if x.is_inference() else x._version


def base_of(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `x` is a view of, if autograd knows it as one. There is no public name."""
    return x._base


# A key shared by all Python objects of one storage, valid while the storage lives. `data_ptr()` is not
# enough: it is 0 for all storages without memory, and memory is reused.
storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

# A context whose operations no dispatch mode observes; torch has no public name for it.
unobserved: Callable[[], AbstractContextManager[Any]] = _disable_current_modes


def is_in_backward() -> bool:
    """Whether the autograd engine is running a backward pass in this thread.

    FSDP and activation checkpointing ask the same way; there is no public name.
    """
    return torch._C._current_graph_task_id() != -1


# Whether a transform of `torch.func`, such as `grad` or `vmap`, is active; and whether a tensor is batched by
# the older `vmap` that computes batched gradients (`is_grads_batched`).
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def has_tangent(arguments: Iterable[Any]) -> bool:
    """Whether forward-mode differentiation, whose level is private, follows a tensor among arguments."""
    return forward_ad._current_level >= 0 and any(
        isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments
    )


@cache
def is_in_place(func: Any) -> bool:
    """Whether an operation, as `__torch_dispatch__` receives it, writes to its first argument."""
    return func._schema.is_mutable


_HOOKS = "_forward_hooks", "_backward_hooks", "_post_accumulate_grad_hooks"
_HOOKS_BEFORE = *_HOOKS, "_forward_pre_hooks", "_backward_pre_hooks"


def has_hooks(of: torch.nn.Module | torch.Tensor, before: bool = False) -> bool:
    """Whether hooks see a module's output, or its input, or a leaf's gradient; torch lists none publicly."""
    return any(getattr(of, name, None) for name in (_HOOKS_BEFORE if before else _HOOKS))


def is_called_after_accumulation(p: torch.Tensor, hook: Callable[..., Any]) -> bool:
    """Whether a parameter has a hook that sees its accumulated gradient. None is listed publicly."""
    return hook in (p._post_accumulate_grad_hooks or {}).values()


def accept_any_gradient(p: torch.Tensor) -> None:
    """Let autograd accumulate gradients of any float dtype in a leaf, from torch 2.13 on.

    Older versions convert each gradient to the dtype of the leaf (`Tensor.grad_dtype` is not there).
    """
    if hasattr(torch.Tensor, "grad_dtype"):
        p.grad_dtype = None


def is_accumulated(node: Any) -> bool:
    """Whether the backward pass that is running adds to the gradient of the leaf that a node stands for.

    False under `torch.autograd.grad`, which returns it: torch refuses the question there with an error. It
    has no public name; `register_multi_grad_hook` asks the same way.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def reattach_hooks(p: torch.Tensor) -> None:
    """Let the hooks of a parameter see the gradients of the tensor that it has become (`swap_tensors`).

    Python holds the hooks by the parameter, autograd by the tensor; setting the attribute joins the two.
    """
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(p, kind)) is not None:
            setattr(p, kind, hooks)


def group_of_collective(args: Iterable[Any]) -> dist.ProcessGroup:
    """The process group among the arguments of a `c10d` operation, a C++ function."""
    boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    return dist.ProcessGroup.unbox(boxed)


def is_collective(func: Any) -> bool:
    """Whether an operation, as `__torch_dispatch__` receives it, is one of `torch.distributed`.

    Schemas of these do not say which of their arguments they write to.
    """
    return str(func._schema.name).startswith("c10d::")


def wait_for(result: Any) -> Any:
    """The result of a `c10d` operation, once it is there."""
    for boxed in tree_leaves(result):
        if isinstance(boxed, torch.ScriptObject) and "Work" in str(boxed._type()):
            dist.Work.unbox(boxed).wait()
    return result


# A one-dimensional mesh of a name with all ranks of a mesh in row-major order. torchtitan also calls it;
# creating the groups by hand would create them twice.
flatten_mesh: Callable[[DeviceMesh, str], DeviceMesh] = DeviceMesh._flatten

# Keeps DDP from broadcasting or reducing parameters and buffers of a module, by their names; called before
# wrapping. The constructor has no argument for this.
ignore_in_ddp: Callable[[torch.nn.Module, Sequence[str]], None] = (
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
)

# The DistributedDataParallel whose forward pass is running; None outside one. Nothing public detects this.
active_ddp: Callable[[], DistributedDataParallel | None] = DistributedDataParallel._get_active_ddp_module

# Whether `unscale_` of a scaler found a non-finite gradient of an optimizer, per device: writable float32
# tensors, 1 or 0. torch's FSDP scaler shares them between ranks the same way.
overflow_flags: Callable[..., dict[Any, Any]] = torch.amp.GradScaler._found_inf_per_device


def tensors_in(output: Any) -> Sequence[torch.Tensor]:
    """The tensors in a module's output, as DDP finds them: in tuples, lists, dicts and dataclasses."""
    return list(_find_tensors(output))


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running in this thread.

    FSDP and DDP queue their final work the same way; there is no public name.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class FSDPExtension(Protocol):
    """The methods by which FSDP2 asks a shard what to communicate: an experimental interface."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The tensors that FSDP sends of a shard, and metadata; FSDP counts the arguments."""

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The full parameter, from the tensors that have arrived; None once it is written to `out`."""


def attach_fsdp_extension(shard: torch.Tensor, extension: FSDPExtension) -> None:
    """Give a plain tensor the FSDP2 extension methods of `extension`, as if it were a tensor subclass.

    FSDP2 looks for the two names on the sharded tensor; torchao's subclasses also define them.
    """
    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        setattr(shard, name, getattr(extension, name))


class SeesFSDP:
    """A module that is asked before torch's `fully_shard`, or FSDP's older wrapper, shards it.

    Both mark the modules whose parameters they have sharded, for the compiler. There is no public
    notification.
    """

    def accept_fsdp(self) -> None:
        """Raise an error if FSDP cannot shard the module."""

    @property
    def _is_fsdp_managed_module(self) -> bool:
        return "under_fsdp" in self.__dict__

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, _: bool) -> None:
        self.accept_fsdp()
        self.__dict__["under_fsdp"] = True


class _MetaDevice(torch.cpu.Stream):
    """What FSDP2 looks for as `torch.meta`: the meta device's streams and events, which order nothing."""

    Event, stream = torch.cpu.Event, torch.cpu.stream
    current_device, is_initialized, device_count = int, torch.cpu.is_available, torch.cpu.device_count

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


_MetaDevice.Stream = _MetaDevice.current_stream = _MetaDevice  # type: ignore[attr-defined]


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Make this process one rank of many, on the meta device: collectives return at once and do nothing.

    FSDP2, DDP and pipelines work in it. Torch's tests and simulators use the same groups. FSDP2 refuses meta
    tensors only as a reminder to materialize a model. DTensor takes an old world's mesh for an equal one.
    """
    import_module("torch.testing._internal.distributed.fake_pg")
    group = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group").FSDPParamGroup
    forget = import_module("torch.distributed.tensor.debug")
    check, group._validate_no_meta_params = group._validate_no_meta_params, lambda _: None
    torch.meta = _MetaDevice  # type: ignore[attr-defined]
    dist.Backend.backend_capability["fake"] = ["cpu", "meta"]
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        del torch.meta  # type: ignore[attr-defined]
        group._validate_no_meta_params = check
        forget._clear_python_sharding_prop_cache()
        forget._clear_fast_path_sharding_prop_cache()


def cpu_multiplies_bf16() -> bool:
    """Whether oneDNN has bf16 matmuls on this CPU; `torch.backends.mkldnn` only reports that it exists."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def cuda_architectures() -> tuple[str, ...]:
    """The GPU architectures that this torch was compiled for, such as sm_90; empty in a CPU build.

    `torch.cuda.get_arch_list()` is empty where no GPU is visible, and initializes one where it is.
    """
    flags = getattr(torch._C, "_cuda_getArchFlags", str)()
    return tuple(flags.split()) if flags else ()


def fp8_product(a_MK: torch.Tensor, b_KN: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """a_MK b_KN of FP8 tensors with one scale each, fast accumulation, in bf16: only for measuring ceilings.

    Calls what `scaled_mm` calls in the end, without its overhead.
    """
    return torch._scaled_mm(a_MK, b_KN, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


@cache
def is_view_operation(func: Any) -> bool:
    """Whether an operation, as `__torch_dispatch__` receives it, only creates a view."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def has_result(func: Any) -> bool:
    """Whether an operation, as `__torch_dispatch__` receives it, returns anything."""
    return bool(func._schema.returns)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """The arguments that an operation writes to, as `__torch_dispatch__` gets it, by position or name."""
    written: dict[int | str, Any] = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.name in kwargs:
                written[argument.name] = kwargs[argument.name]
            elif i < len(args):
                written[i] = args[i]
    return written


def extension_file() -> str:
    """The path of torch's extension module, which is linked with its libraries."""
    return str(torch._C.__file__)


@cache
def operation_name(func: Any) -> str:
    """The name of an operation, as `__torch_dispatch__` receives it, without namespace and overload."""
    return str(func._schema.name).partition("::")[2]
