"""The record of a parameter: one attribute, attached only where there is something to say, and never lost."""

import copy
import io

import pytest
import torch

from narrowgauge.nn import Linear, convert
from narrowgauge.quantization import (
    ParamState,
    QuantizedState,
    ShardAxis,
    TensorShard,
    ensure_state,
    full_axis,
    gradient_of,
    has_gradient,
    master_or_weight,
    shard_of,
    state_of,
    stored_tensor,
    write_weight,
)
from narrowgauge.recipes import recipe

K, N = 96, 128
NARROW = ["bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3"]
GRAD_ONLY = recipe("bf16").with_places({"grad": "bf16"})


def layer(of="msamp-o3"):
    torch.manual_seed(0)
    return convert(torch.nn.Linear(K, N), of)


def saved_and_loaded(thing, **how):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **how)


def is_one(layer):
    """Whether parameter and layer have the same record, and the weight shows its values."""
    state = state_of(layer.weight)
    return state is layer.state_at_rest and torch.equal(layer.weight.float(), state.weight.read())


class TestTheRecord:
    def test_reading_attaches_nothing(self):
        p = torch.nn.Parameter(torch.ones(3))
        assert state_of(p).index == -1
        assert shard_of(p) is None
        assert not has_gradient(p)
        assert gradient_of(p) is None
        assert torch.equal(master_or_weight(p), stored_tensor(p))
        assert vars(p) == {}

    def test_changing_attaches_one_attribute(self):
        p = torch.nn.Parameter(torch.ones(3))
        ensure_state(p).index = 5
        ensure_state(p).holders = 2
        assert list(vars(p)) == ["narrowgauge"]
        assert (state_of(p).index, state_of(p).holders) == (5, 2)

    def test_nothing_else_can_be_put_into_it(self):
        with pytest.raises(AttributeError):
            ParamState().number = 3

    @pytest.mark.parametrize("name", NARROW)
    def test_it_is_all_that_a_converted_weight_carries(self, name):
        p = layer(name).weight
        assert set(vars(p)) == {"narrowgauge", "views", "_is_param"}
        assert set(state_of(p).by_place()) - {"master"} == {"weight", "grad"}

    @pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "nvfp4"])
    def test_a_plain_weight_carries_nothing(self, name):
        """So that other programs read it when it is saved."""
        p = layer(name).weight
        assert vars(p) == {}
        assert torch.equal(saved_and_loaded(p, weights_only=True), p)

    def test_another_recipe_replaces_what_is_kept_and_nothing_else(self):
        one = layer("msamp-o3")
        numbers = master_or_weight(one.weight)
        ensure_state(one.weight).index = 4
        two = convert(one, "fp8")
        assert state_of(two.weight).by_place() == {}
        assert state_of(two.weight).index == 4
        assert two.state_at_rest is None
        assert torch.equal(two.weight, numbers)
        three = convert(two, "msamp-o2")
        assert is_one(three)
        assert state_of(three.weight).index == 4

    def test_a_shard_that_is_whole_is_none(self):
        p = torch.nn.Parameter(torch.ones(3, 2))
        ensure_state(p).shard = TensorShard((full_axis(3), full_axis(2)))
        assert shard_of(p) is None


class TestOnTheWay:
    @pytest.mark.parametrize("name", NARROW)
    def test_a_copy_has_a_record_of_its_own(self, name):
        one = layer(name)
        ensure_state(one.weight).index = 7
        two = copy.deepcopy(one)
        assert is_one(one)
        assert is_one(two)
        assert state_of(two.weight).index == 7
        before = master_or_weight(one.weight).clone()
        write_weight(two.weight, torch.zeros(N, K))
        assert torch.equal(master_or_weight(one.weight), before)

    @pytest.mark.parametrize("name", NARROW)
    def test_a_saved_layer(self, name):
        one = layer(name)
        ensure_state(one.weight).index = 7
        two = saved_and_loaded(one, weights_only=False)
        assert is_one(two)
        assert state_of(two.weight).index == 7
        assert torch.equal(master_or_weight(two.weight), master_or_weight(one.weight))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_another_dtype(self, dtype):
        narrow, plain = layer("msamp-o3"), layer("fp8")
        for one in (narrow, plain):
            ensure_state(one.weight).index = 7
            before = one.weight
            one.to(dtype)
            assert one.weight is before
            assert state_of(one.weight).index == 7
        assert is_one(narrow)

    def test_another_device(self):
        one = layer("msamp-o3")
        ensure_state(one.weight).index = 7
        before = one.weight
        one.to("meta")
        assert one.weight is before
        state = state_of(one.weight)
        assert state is one.state_at_rest
        assert state.index == 7
        assert all(t.is_meta for kept in state.by_place().values() for t in kept.tensors.values())
        assert one.weight.is_meta
        assert one.weight.dtype == torch.float32

    @pytest.mark.parametrize("assign", [False, True])
    @pytest.mark.parametrize("name", [*NARROW, "fp8"])
    def test_a_state_dict_is_loaded(self, name, assign):
        one, numbers = layer(name), {"weight": torch.randn(N, K), "bias": torch.randn(N)}
        one.load_state_dict(numbers, assign=assign)
        if name == "fp8":
            assert torch.equal(one.weight, numbers["weight"])
        else:
            assert is_one(one)
            assert torch.equal(state_of(one.weight).weight.read(), held(one, numbers["weight"])["weight"])
        assert torch.equal(one.bias, numbers["bias"])

    def test_weights_are_loaded_where_only_the_gradient_is_narrow(self):
        one, numbers = layer(GRAD_ONLY), {"weight": torch.randn(N, K), "bias": torch.randn(N)}
        assert isinstance(one, Linear)
        one.load_state_dict(numbers)
        assert torch.equal(one.weight, numbers["weight"])
        assert torch.equal(one.state_dict()["weight"], numbers["weight"])

    def test_a_state_dict_holds_no_records(self):
        one = layer("msamp-o3")
        saved = saved_and_loaded(one.state_dict(), weights_only=True)
        assert type(saved["weight"]) is torch.Tensor
        assert vars(saved["weight"]) == {}
        assert torch.equal(saved["weight"], one.weight.detach())


def held(one, numbers):
    """What master and weight hold of float32 values: the weight rounds those of its master."""
    found = {}
    for place in ("master", "weight"):
        if (cast := one.recipe.state[place]) is not None:
            state = QuantizedState(numbers.shape, cast)
            state.write(numbers)
            numbers = found[place] = state.read()
    return found


@pytest.mark.parametrize("of", ["fp32", GRAD_ONLY, *NARROW])
def test_weight_and_master_are_written_together(of):
    one, numbers = layer(of), torch.randn(N, K)
    write_weight(one.weight, numbers)
    places = state_of(one.weight).by_place()
    for place, expected in held(one, numbers).items():
        assert torch.equal(places[place].read() if place in places else one.weight, expected)


@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "msamp-o3"])
def test_a_layer_that_holds_some_rows_loads_its_own_state_dict(name):
    held = layer(name)
    rows = ShardAxis(3 * N, ((2 * N, N),), (object(),))  # the last of three ranks
    ensure_state(held.weight).shard = TensorShard((rows, full_axis(K)))
    saved = {key: t.detach().clone() + 1 for key, t in held.state_dict().items()}
    held.load_state_dict(saved)
    found = held.state_dict()
    assert all(torch.allclose(found[key], t, rtol=2**-3) for key, t in saved.items())
