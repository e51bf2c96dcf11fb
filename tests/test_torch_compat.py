"""Every private or young name of torch that the package uses, called for what the package takes it to mean.

This runs on whatever torch is installed. CI has one version; to try another one, make an environment with it
and run this file alone there, before anything else:

    python -m venv /tmp/torch-2.11 && /tmp/torch-2.11/bin/pip install torch==2.11.0 -e '.[dev]'
    /tmp/torch-2.11/bin/python -m pytest tests/test_torch_compat.py
"""

import ast
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from narrowgauge.system import torch_compat as compat

#: They are public, but newer than FSDP2 itself.
SETTERS = ["reshard", "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms"]
SETTERS += ["set_gradient_divide_factor", "set_requires_gradient_sync", "set_reshard_after_backward"]
SETTERS += ["set_is_last_backward"]


@pytest.fixture
def four_fake_ranks():
    """Rank 0 of four, whose collectives do nothing."""
    with compat.fake_world(0, 4):
        yield dist.group.WORLD


class Named(compat.Wrapper):
    """A tensor without memory, which records the operations that reach it."""

    seen: list

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = next(x for x in compat.tree_leaves(args) if isinstance(x, Named))
        first.seen.append(func)
        return torch.zeros(first.shape)


def test_a_wrapper_subclass_looks_as_it_was_told_and_its_operations_have_plain_results():
    x = compat.wrapper_subclass(Named, (2, 3), (3, 1), torch.float32, torch.device("meta"))
    x.seen = []
    assert type(x) is Named
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (3, 1), torch.float32, "meta")
    assert type(x + 1) is torch.Tensor
    assert x.seen == [torch.ops.aten.add.Tensor]


class Observing(compat.TorchDispatchMode):
    """A mode that lists the operations it sees, and the groups of collectives."""

    def __init__(self):
        super().__init__()
        self.names, self.groups = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.groups.append(compat.group_of_collective(args))
        self.names.append(func.name())
        return compat.wait_for(func(*args, **(kwargs or {})))


def test_a_dispatch_mode_sees_operations_and_collectives_unless_unobserved(four_fake_ranks):
    assert not compat.is_in_torch_dispatch_mode()
    with Observing() as mode:
        assert compat.is_in_torch_dispatch_mode()
        with compat.unobserved():
            x = torch.ones(2)
        assert not mode.names
        x = x + 1
        dist.all_reduce(x)
    assert mode.names[0] == "aten::add.Tensor"
    assert "c10d::allreduce_" in mode.names
    assert [dist.get_process_group_ranks(group) for group in mode.groups] == [[0, 1, 2, 3]]


def test_operations_tell_what_they_do():
    aten, a, b = torch.ops.aten, torch.ones(2), torch.ones(2)
    assert compat.is_in_place(aten.add_.Tensor)
    assert compat.is_in_place(aten.copy_.default)
    assert not compat.is_in_place(aten.add.Tensor)
    assert not compat.is_collective(aten.add_.Tensor)
    assert compat.is_collective(torch.ops.c10d.broadcast_.default)
    assert compat.has_result(aten.add_.Tensor)
    assert not compat.has_result(aten._foreach_add_.Scalar)
    assert compat.operation_name(aten.add.Tensor) == "add"
    assert compat.is_view_operation(aten.view.default)
    assert not compat.is_view_operation(aten.add.Tensor)
    assert not compat.is_view_operation(aten.add_.Tensor)
    assert compat.written_arguments(aten.add_.Tensor, (a, b), {}) == {0: a}
    assert compat.written_arguments(aten.add.out, (a, b), {"out": b}) == {"out": b}
    assert compat.written_arguments(aten.add.Tensor, (a, b), {}) == {}


class Noting(torch.autograd.Function):
    """x * 1, whose backward pass calls a function with its context and the gradient."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return ctx.note(ctx, dy), None


def test_a_leaf_takes_gradients_of_the_dtype_that_they_have():
    """And an edge to it shows whether they are accumulated, which `torch.autograd.grad` does not do."""
    found = []

    def half(ctx, dy):
        found.append(compat.is_accumulated(ctx.next_functions[0][0]))
        return dy.bfloat16()

    leaf = torch.zeros(2, requires_grad=True)
    compat.accept_any_gradient(leaf)
    Noting.apply(leaf, half).sum().backward()
    assert leaf.grad.dtype == (torch.bfloat16 if hasattr(torch.Tensor, "grad_dtype") else torch.float32)
    torch.autograd.grad(Noting.apply(leaf, half).sum(), leaf)
    assert found == [True, False]


def test_a_transform_is_noticed_and_so_is_the_older_batch_of_gradients():
    found = []

    def note(ctx, dy):
        found.append((compat.is_transformed(), compat.is_batched(dy)))
        return dy

    torch.autograd.functional.jacobian(lambda x: Noting.apply(x, note), torch.ones(2), vectorize=True)
    Noting.apply(torch.ones(2, requires_grad=True), note).sum().backward()
    torch.func.vmap(lambda x: found.append(compat.is_transformed()) or x)(torch.ones(2))
    assert found == [(False, True), (False, False), True]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own
def test_a_tensor_that_forward_mode_follows_is_noticed():
    x = torch.ones(2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert (compat.has_tangent([1, dual]), compat.has_tangent([1, x])) == (True, False)
    assert not compat.has_tangent([dual])


def test_trees_are_walked_through():
    tree = ([1, (2.5,)], {"a": [3]})
    assert compat.tree_leaves(tree) == [1, 2.5, 3]
    assert compat.tree_map_only(int, lambda n: -n, tree) == ([-1, (2.5,)], {"a": [-3]})
    a, b = torch.ones(1), torch.ones(2)
    assert [t.numel() for t in compat.tensors_in({"x": [a, (b, 3)]})] == [1, 2]


def test_collectives_of_one_tensor_and_a_flattened_mesh(four_fake_ranks):
    row, rows = torch.ones(3), torch.zeros(12)
    compat.all_gather_single(rows, row, group=four_fake_ranks)
    compat.reduce_scatter_single(row, rows, group=four_fake_ranks)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    flat = compat.flatten_mesh(mesh["a", "c"], "both")
    assert flat.mesh.tolist() == [0, 1, 2, 3]
    assert flat.get_group().size() == 4


def test_the_local_tensor_is_the_object_itself(four_fake_ranks):
    mesh = init_device_mesh("cpu", (4,))
    shard = torch.ones(2, 3)
    whole = DTensor.from_local(shard, mesh, [Shard(0)])
    compat.local_tensor(whole).note = "kept"
    assert compat.local_tensor(whole).note == "kept"
    assert compat.local_tensor(shard) is shard
    assert not hasattr(whole.to_local(), "note")
    with torch.no_grad():
        whole.to_local().mul_(2)
    assert torch.equal(compat.local_tensor(whole), torch.full((2, 3), 2.0))
    assert compat.version_of(compat.local_tensor(whole)) == 1
    local = torch.arange(6.0).view(2, 3)
    found = compat.as_shard(local, whole)
    assert compat.local_tensor(found) is local
    assert (found.shape, found.placements) == ((8, 3), (Shard(0),))


def test_views_share_writes_and_a_storage():
    x, y = torch.zeros(4), torch.zeros(4)
    view = x[1:]
    assert (compat.version_of(x), compat.version_of(view)) == (0, 0)
    view.add_(1)
    x.mul_(2)
    assert (compat.version_of(x), compat.version_of(view)) == (2, 2)
    assert compat.base_of(view) is x
    assert compat.base_of(x) is None
    key = compat.storage_key(x.untyped_storage())
    assert compat.storage_key(view.untyped_storage()) == key
    assert compat.storage_key(y.untyped_storage()) != key
    empty = [torch.empty(0, device="meta") for _ in range(2)]
    assert len({compat.storage_key(e.untyped_storage()) for e in empty}) == 2
    product = torch.arange(6.0, requires_grad=True) * 2
    reshaped = compat.reshaped(product, (2, 3))  # no view, in the same memory
    assert (reshaped.shape, reshaped._is_view()) == ((2, 3), False)
    assert reshaped.data_ptr() == product.data_ptr()


def test_it_is_known_whether_a_backward_pass_runs_and_which_node():
    told, nodes = [], []

    def look(x):
        told.append(compat.is_in_backward())
        return x * x

    assert not compat.is_in_backward()
    y = checkpoint(look, torch.ones(2, requires_grad=True), use_reentrant=False)
    y.register_hook(lambda g: nodes.append(compat.autograd_node()))
    y.exp().sum().backward()
    assert told == [False, True]
    assert not compat.is_in_backward()
    assert nodes[0] is not None
    assert compat.autograd_node() is None


def test_hooks_are_seen_and_go_with_a_parameter_that_becomes_another_tensor():
    layer = torch.nn.Linear(2, 2)
    for register in (layer.register_forward_hook, layer.register_full_backward_hook):
        assert not compat.has_hooks(layer)
        handle = register(lambda *_: None)
        assert compat.has_hooks(layer)
        handle.remove()
    layer.register_forward_pre_hook(lambda *_: None)
    assert (compat.has_hooks(layer), compat.has_hooks(layer, before=True)) == (False, True)
    p, seen = torch.nn.Parameter(torch.ones(2)), []
    accumulated = lambda p: seen.append("accumulated")  # noqa: E731
    assert not compat.is_called_after_accumulation(p, accumulated)
    p.register_hook(lambda g: seen.append("gradient"))
    p.register_post_accumulate_grad_hook(accumulated)
    assert compat.is_called_after_accumulation(p, accumulated)
    torch.utils.swap_tensors(p, torch.nn.Parameter(torch.ones(3)))
    compat.attach_hooks_again(p)
    p.sum().backward()
    assert seen == ["gradient", "accumulated"]


def test_without_torch_function_operations_reach_no_subclass():
    class Counts(torch.Tensor):
        called = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.called += 1
            return super().__torch_function__(func, types, args, kwargs)

    x = torch.ones(2).as_subclass(Counts)
    with compat.without_torch_function():
        torch.add(x, 1)
    assert Counts.called == 0
    torch.add(x, 1)
    assert Counts.called == 1


def test_a_ddp_ignores_what_it_is_told_to_and_is_known_within_its_forward_pass_only(four_fake_ranks):
    seen = []

    class Seen(torch.nn.Linear):
        def forward(self, x):
            seen.append(compat.active_ddp())
            return super().forward(x)

    module = Seen(2, 2)
    compat.ignore_in_ddp(module, ["bias"])
    wrapped = DistributedDataParallel(module, init_sync=False)
    (bucketed,) = wrapped._module_parameters
    assert bucketed is module.weight
    wrapped(torch.ones(1, 2))
    assert seen == [wrapped]
    assert compat.active_ddp() is None


def test_a_callback_comes_after_the_whole_backward_pass():
    order = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: order.append("the first leaf"))
    y = 2 * x
    y.register_hook(lambda _: compat.after_backward(lambda: order.append("the end")))
    y.sum().backward()
    assert order == ["the first leaf", "the end"]


def test_fsdp_asks_modules_and_plain_tensors_and_has_the_names_that_are_called(four_fake_ranks):
    class Refuses(compat.SeesFSDP, torch.nn.Linear):
        def accept_fsdp(self):
            raise LookupError("asked")

    class Extension(compat.FSDPExtension):
        def fsdp_pre_all_gather(self, *args):
            return self, args

        def fsdp_post_all_gather(self, *args, **kwargs):
            return args

    with pytest.raises(LookupError, match="asked"):
        fully_shard(torch.nn.Sequential(Refuses(4, 4)), mesh=init_device_mesh("cpu", (4,)))
    shard, extension = torch.ones(2), Extension()
    compat.attach_fsdp_extension(shard, extension)
    assert shard.fsdp_pre_all_gather(1) == (extension, (1,))
    assert shard.fsdp_post_all_gather(2) == (2,)
    source = Path(_fsdp_param.__file__).read_text()  # it looks for these two names
    assert '"fsdp_pre_all_gather"' in source
    assert '"fsdp_post_all_gather"' in source
    for setter in SETTERS:
        assert callable(getattr(FSDPModule, setter))


def test_overflow_found_on_another_rank_skips_the_step():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    (flag,) = compat.overflow_flags(scaler, optimizer).values()
    assert flag.item() == 0
    flag.fill_(1)  # as an all-reduce with MAX would
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.ones(2))
    assert scaler.get_scale() == 2.0


def test_what_this_torch_has():
    assert compat.cpu_multiplies_bf16() in (True, False)
    names = compat.cuda_architectures()
    assert all(name.startswith(("sm_", "compute_", "gfx")) for name in names)
    assert bool(names) == (torch.version.cuda is not None or torch.version.hip is not None)
    blocks = ("BlockWise1x16", "BlockWise1x32", "BlockWise1x128", "BlockWise128x128")
    assert {"TensorWise", "RowWise", *blocks} <= set(compat.ScalingType.__members__)
    assert {"NO_SWIZZLE", "SWIZZLE_32_4_4"} <= set(compat.SwizzleType.__members__)
    assert Path(compat.extension_file()).is_file()


def test_scaled_products_multiply():
    a = torch.tensor([[1.0, 2.0] * 8] * 16)
    narrow = a.to(torch.float8_e4m3fn)
    two, expected = torch.full((), 2.0), 4 * (a @ a.T)
    scale, kind = [two.reshape(1)], [compat.ScalingType.TensorWise]
    scales = {"scale_a": scale, "scale_recipe_a": kind, "scale_b": scale, "scale_recipe_b": kind}
    try:
        assert torch.equal(compat.fp8_product(narrow, narrow.T, two).float(), expected)
        product = compat.scaled_mm(narrow, narrow.T, **scales, output_dtype=torch.bfloat16)
    except (NotImplementedError, RuntimeError) as error:
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
            raise
        pytest.skip(f"this torch has no CPU kernel: {error}")
    assert torch.equal(product.float(), expected)


def test_strict_determinism_is_lifted_for_an_operation_that_repeats():
    torch.use_deterministic_algorithms(True)
    try:
        with compat.not_strict():
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.use_deterministic_algorithms(False)
    with compat.not_strict():
        assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tensors_at_once_have_the_bits_of_each(dtype):
    g = torch.Generator().manual_seed(0)
    many = [torch.randn(shape, generator=g).to(dtype) for shape in ((300, 7), (1,), (5000,), (16, 33))]
    for order in (2.0, 1.0, torch.inf, 3.0):
        norms = compat.norm_each(many, order, torch.float64)
        each = [torch.linalg.vector_norm(x, order, dtype=torch.float64) for x in many]
        assert all(torch.equal(a, b) for a, b in zip(norms, each, strict=True))
        assert compat.norm_each([], order, torch.float64) == []
    factor = torch.tensor(0.3337)
    expected = [x.clone().mul_(factor) for x in many]
    compat.scale_each(many, factor)
    compat.scale_each([], factor)
    assert all(torch.equal(a, b) for a, b in zip(many, expected, strict=True))
    to = [torch.zeros(2), torch.zeros(())]
    before = list(to)
    compat.copy_each(to, [torch.arange(2.0), torch.tensor(3)])
    assert [t.tolist() for t in before] == [[0, 1], 3]


def test_every_name_is_called_here():
    source = Path(__file__).read_text(encoding="utf-8")
    names = []
    for node in ast.parse(Path(compat.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.append(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname for alias in node.names if alias.asname]
    assert len(names) > 50
    assert [n for n in names if not n.startswith("_") and f"compat.{n}" not in source] == []


@pytest.mark.tier("thorough")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's CPU code needs g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_as_eager_keeps_a_rounding_and_asks_it_of_nothing_else():
    assert "emulate_precision_casts" in import_module("torch._inductor").list_options()
    x, y = torch.linspace(1, 2, 99, dtype=torch.bfloat16), torch.linspace(0, 1, 99, dtype=torch.bfloat16)

    def twice_rounded(x, y):
        return (x + y) * y

    torch._dynamo.reset()
    assert torch.equal(compat.compiled_as_eager(twice_rounded)(x, y), twice_rounded(x, y))
    torch._dynamo.reset()
    assert not torch.equal(torch.compile(twice_rounded)(x, y), twice_rounded(x, y))
