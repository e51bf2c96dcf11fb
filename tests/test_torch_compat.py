"""Private or young names of torch, called for what the package takes them to mean.

Only those whose users would not show it: identity, versions and storages of tensors, hooks, names of FSDP.
"""

import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param

from narrowgauge.system import torch_compat as compat

#: They are public, but newer than FSDP2 itself.
SETTERS = ["reshard", "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms"]
SETTERS += ["set_gradient_divide_factor", "set_requires_gradient_sync", "set_reshard_after_backward"]
SETTERS += ["set_is_last_backward"]


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
    compat.reattach_hooks(p)
    p.sum().backward()
    assert seen == ["gradient", "accumulated"]


def test_fsdp_asks_modules_and_plain_tensors_and_has_the_names_that_are_called():
    class Refuses(compat.SeesFSDP, torch.nn.Linear):
        def accept_fsdp(self):
            raise LookupError("asked")

    class Extension(compat.FSDPExtension):
        def fsdp_pre_all_gather(self, *args):
            return self, args

        def fsdp_post_all_gather(self, *args, **kwargs):
            return args

    with compat.fake_world(0, 4), pytest.raises(LookupError, match="asked"):
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
