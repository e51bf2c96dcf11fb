"""Wrong arguments of the public functions and classes: each is answered by one sentence.

What a name, a file or a number may be is tested where it is read; here is what everyone types once: nothing,
a number, a list, a name that is not there.
"""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import emulate, make_cast
from narrowgauge.system.errors import UserError

X, LAYER = torch.zeros(2, 32), torch.nn.Linear(32, 32)
NO_MODELS = (None, 3, "mxfp8", [1], {}, X)
FACTS = {"name": "e4m3b", "exponent_bits": 4, "mantissa_bits": 3, "bias": 7, "specials": ng.Specials.NONE}
SOME = [torch.nn.Parameter(X.clone())]


def each_model(*others):
    """A model argument that is none, before other arguments."""
    return [(wrong, *others) for wrong in NO_MODELS]


PUBLIC = {name: getattr(ng, name) for name in ng.__all__}  # imported now, not in a test
#: By public name: positional arguments, or keyword arguments as a dictionary.
WRONG = {
    "AdamW": [(3,), (None,), ([3],), ("xy",), ([],), ([{}],), ([{"params": 3}],), (LAYER,), ([(1, 2)],),
              (SOME, 3), *[{"params": SOME} | wrong for wrong in (
                  {"lr": "x"}, {"lr": -1.0}, {"lr": float("nan")}, {"betas": 0.9}, {"betas": (0.9,)},
                  {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": None}, {"seed": "x"}, {"seed": 1.5},
              )], ([{"params": SOME, "lr": "x"}],)],
    "Format": [FACTS | wrong for wrong in (
        {"name": 3}, {"exponent_bits": "4"}, {"exponent_bits": 4.0}, {"mantissa_bits": None}, {"bias": [7]},
        {"bias": -(10**6)}, {"bias": 10**6}, {"exponent_bits": 30}, {"exponent_bits": True},
        {"specials": "none"}, {"signed": 1}, {"source": 3},
    )],
    "Muon": [(3,), ([3],), ("xy",), ([],), ([{}],), (SOME, 3), ([{"params": SOME, "algorithm": "sgd"}],),
             {"params": SOME, "momentum": 1.5}],
    "QTensor": [],  # a record that quantize makes
    "Recipe": [],  # a record that `recipe` makes
    "Specials": [(3,), ("none",), ("NONE",), ([1],), (None,)],
    "advise": [
        (3,), ([1],), (None,), ("nope",), ("debug", 3), ("debug", [1]), ("debug", "h100", "x"),
        *[{"model": "debug", "cluster": "h100", "tokens": 1e9} | wrong for wrong in (
            {"hours": "x"}, {"money": [1]}, {"devices": "8"}, {"devices": 0}, {"recipes": 3}, {"price": [3]},
        )],
    ],
    "audit": [*each_model(), (LAYER, 3), (LAYER, "nope"), (LAYER, "mxfp8", 3)],
    "compare": [
        (3,), (["bf16", 3],), (["bf16", "nope"],), (["bf16", "mxfp8"], "x"), (["bf16", "mxfp8"], 1.5),
        *[{"recipes": ["bf16", "mxfp8"]} | wrong for wrong in (
            {"out": 3}, {"variants": 3}, {"rungs": 3}, {"jobs": "x"}, {"gate": [1]},
        )],
    ],
    "convert": [*each_model("mxfp8"), (LAYER, 3), (LAYER, None), (LAYER, [1]), (LAYER, "te"),
                (LAYER, "mxfp8", 3), (LAYER, "mxfp8", (), "auto", 3)],
    "format": [([1],), ({},), (3,), (None,), ("fp8",), ("float16",)],
    "format_names": [],
    "fully_shard": each_model(),
    "gauges": [*each_model(), (LAYER,)],
    "kept_layers": each_model(),
    "load_recipe": [(3,), (None,), ([1],), ("nope.toml",), ("/",)],
    "load_state_dict": [*each_model(None, {}), (LAYER, None, 3), (LAYER, None, None),
                        (LAYER, None, {"model": 3}), *[(LAYER, None, {"model": {}, kind: wrong})
                          for kind in ("stored", "recipe", "position") for wrong in (3, {"x": 3}, {3: X})]],
    "parameter_groups": [*each_model(0.1), (LAYER, 0.1, {"nope": {}}), (torch.nn.ReLU(), 0.1, {"nope": {}}),
                         (LAYER, "x"), (LAYER, 0.1, 3), (LAYER, 0.1, {"*": 3}), (LAYER, 0.1, {3: {}})],
    "plan": [(3,), ([1],), ("nope",), ("debug", 3), ("debug", [1]), ("debug", "mxfp8", 3),
             *[{"model": "debug", "cluster": "h100"} | wrong for wrong in (
                 {"devices": "x"}, {"price": 3}, {"tokens": [1]}, {"tokns": 1},
             )]],
    "predict": [(3,), (None,), ([],), ("mxfp8", [1], 1e9), ("mxfp8", "x", 1e9), ("mxfp8", 1e9, 1e9, [1])],
    "prepare_ddp": each_model(),
    "probe": [(3,), (None,), ([1],), ("nope",), ("nope", 3), ("nope", "mxfp8", "x"),
              *[{"run": "nope"} | wrong for wrong in ({"device": 3}, {"batchs": 1}, {"show": 3})]],
    "quantize": [
        *[(wrong, "mxfp8") for wrong in (None, 3, [1.0], X.int(), torch.tensor(1.0))],
        *[(X, wrong) for wrong in (3, None, [1], "nope", "fp32")],
        *[(X, "mxfp8", wrong) for wrong in (2, -3, "x", None, 1.5)],
        (X, "mxfp8", -1, None, None, 3),
    ],
    "recipe": [(3,), (None,), ([1],), ("te",), ({"nope": 3},)],
    "recipe_names": [("te",), (3,), ([1],), ({1: 2},)],
    "register_cast": [("mxfp8", abs), (3, abs), (None, abs), ("", abs), ("a b", abs), ("mine", 3)],
    "register_format": [(3,), (None,), ("e4m3",), ({},)],
    "round_to": [
        *[(wrong, "e4m3") for wrong in (None, 3, [1.0], X.int())],
        *[(X, wrong) for wrong in (3, None, [1], "nope")],
        *[(x, "e4m3", wrong) for x in (X, torch.zeros(0), torch.tensor(1.0)) for wrong in (3, [1], "nope")],
    ],
    "run": [(3,), ("nope",), ([1],), ({"nope": {}},), ({"training": {"steps": "x"}},)],
    "search": [(3, "x", 1), ("nope", 3, 1), ("nope", "x", 1), ("nope", ["mxfp4"], 0.5, 3),
               ("nope", ["mxfp4"])],
    "sensitivity": [(3, "e4m3"), (None, "e4m3"), ("nope", 3), ("nope", [1]),
                    {"run": "nope", "to": "e4m3", "fork_steps": "x"},
                    {"run": "nope", "to": "e4m3", "batchs": 1}],
    "set_step": each_model(0, 1, 0),
    "state_dict": each_model(),
    "step": each_model(),
    "train": [(3,), ([1],), ("nope",), (None, 3), {"out": 3}],
}  # fmt: skip


def test_every_public_name_has_a_row():
    assert sorted(WRONG) == sorted(ng.__all__)


@pytest.mark.parametrize("name", [name for name, wrong in WRONG.items() if wrong])
def test_a_wrong_argument_is_answered_by_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong in WRONG[name]:
        with pytest.raises(UserError) as caught:
            PUBLIC[name](**wrong) if isinstance(wrong, dict) else PUBLIC[name](*wrong)
        assert "\n" not in str(caught.value).strip()
        assert len(str(caught.value)) > 10
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(0,), (0, 32), (4, 0)])
def test_a_tensor_without_elements_stays_one(shape):
    for cast in ("e4m3", "fp8-row", "mxfp8", "nvfp4"):
        q = ng.quantize(torch.zeros(shape), cast)
        values, scale = emulate(torch.zeros(shape), make_cast(cast), -1, torch.bfloat16)
        assert q.dequantize().shape == values.shape == q.codes.shape == shape
        assert cast != "e4m3" or q.scales == scale == 1
