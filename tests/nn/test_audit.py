"""The account of a converted model: layers with their casts, calls and gradients, and what is unusual."""

import pytest
import torch
from torch import nn

import narrowgauge as ng


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(8, 8)
        self.read, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = self.down(torch.nn.functional.gelu(self.up(x)))
        return self.head(torch.nn.functional.linear(x, self.read.weight))


@pytest.mark.parametrize("name", ["fp8", "msamp-o2", "bf16-sr"])
def test_each_layer_is_listed_with_what_happened_to_it(name):
    torch.manual_seed(0)
    m = ng.convert(Model(), name)
    m.down.weight.requires_grad_(False)
    m.added = nn.Linear(4, 4)
    for _ in range(2):
        m(torch.randn(8, 32)).square().mean().backward()
    found = ng.audit(m)
    of = {record.layer: record for record in found}
    assert list(of) == ["up", "down", "unused", "read", "head", "added"]
    assert [of[layer].calls for layer in of] == [2, 2, 0, 0, 2, None]
    assert [of[layer].gradient for layer in of] == [True, None, False, True, True, False]
    assert of["unused"].note == "never called; no gradient waits"
    assert "never called" in of["read"].note
    assert (name == "fp8") or "other code read the weight" in of["read"].note
    assert of["added"].cast is None
    assert of["added"].note == "not converted: it was added after the conversion"
    assert of["up"].note == ""
    if name == "msamp-o2":
        assert of["up"].cast == "e4m3 x e4m3, weight fp16-scaled"
        assert of["head"].note == "kept in bf16"


def test_the_table_has_a_line_for_each_layer():
    m = ng.convert(nn.Sequential(nn.Linear(32, 32)), "msamp-o2", keep=[])
    assert str(ng.audit(m)).splitlines() == [
        "layer  cast                             calls  gradient  note",
        "0      e4m3 x e4m3, weight fp16-scaled  0      no        never called; no gradient waits",
        "converted 1 of 1 (0 of them kept wide), left 0 as they are",
    ]
