"""Blocks that do not divide a model's tensors are named, with what the last one holds."""

import pytest
import torch

from narrowgauge.nn import outline_of
from narrowgauge.recipes import Outline, cut_blocks, parse_recipe, recipe, recipe_names, resolve


def outline(outputs, inputs=64, name="up"):
    return Outline({name: [(name, None)]}, {name: (outputs, inputs)})


def with_weights(cast):
    return parse_recipe(f"[fprop]\nw = {cast}", "mine.toml")


HUGE = with_weights('{element = "e2m1", block = [4096, 32], scale = "e8m0"}')


@pytest.mark.parametrize("rows", [128, 129, 192, 257])
def test_a_block_that_is_longer_than_the_tensor_is_named(rows):
    assert cut_blocks(resolve(HUGE, outline(rows))) == [
        f"blocks of 4096 in fprop.w do not divide the outputs of 1 of 1 layers: up has {rows}, so its only "
        f"block holds {rows}, padded with zeros"
    ]


def test_a_block_that_is_cut_at_the_edge_is_named_and_one_that_fits_is_not():
    assert cut_blocks(resolve(HUGE, outline(8192))) == []
    assert "up has 4097, so its last block holds 1, padded" in cut_blocks(resolve(HUGE, outline(4097)))[0]
    (found,) = cut_blocks(resolve(recipe("mxfp8").in_high_precision(["nothing"]), outline(64, 40)))
    assert found.startswith("blocks of 32 in fprop.x, fprop.w do not divide the inputs")
    assert "dgrad" not in found


def test_tokens_count_where_they_are_known_and_transforms_as_well():
    assert cut_blocks(resolve(recipe("mxfp8"), outline(64)), tokens=64) == []
    (found,) = cut_blocks(resolve(recipe("mxfp8"), outline(64)), tokens=80)
    assert "blocks of 32 in wgrad.dy, wgrad.x do not divide the tokens of 1 of 1 layers: up has 80" in found
    assert cut_blocks(resolve(recipe("mxfp8"), outline(64, name="blocks.0.experts.1.up")), tokens=80) == []
    r = parse_recipe('wgrad = {element = "e2m1", block = "row", scale = "fp32", hadamard = 16}', "mine.toml")
    (found,) = cut_blocks(resolve(r, outline(64)), tokens=24)
    assert found.startswith("transforms of 16 in wgrad.dy, wgrad.x do not divide the tokens")
    assert "its last transform holds 8" in found


def test_kept_layers_and_later_casts():
    kept = parse_recipe(HUGE_TEXT + '[keep]\nmodules = ["up"]', "mine.toml")
    assert cut_blocks(resolve(kept, outline(100))) == []
    late = parse_recipe(
        '[[rule]]\nfrom_share = 0.5\nfprop.w = {cast = "mxfp8", block = [48, 32]}', "mine.toml"
    )
    assert "blocks of 48 in fprop.w" in cut_blocks(resolve(late, outline(64)))[0]
    state = parse_recipe('m = {element = "e4m3", block = [1, 48], scale = "fp32"}', "mine.toml")
    assert "blocks of 48 in m do not divide the inputs" in cut_blocks(resolve(state, outline(64)))[0]


HUGE_TEXT = '[fprop]\nw = {element = "e2m1", block = [4096, 32], scale = "e8m0"}\n'


@pytest.mark.parametrize("name", recipe_names())
def test_no_shipped_recipe_cuts_blocks_of_a_model_of_round_sizes(name):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    assert cut_blocks(resolve(recipe(name), outline_of(model)), tokens=512) == []
