"""Keys of casts that contradict each other or their place, tensors that do not fit: each in a sentence."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import QuantizedState, make_cast
from narrowgauge.recipes import parse_recipe
from narrowgauge.system.errors import UserError

KEEP = 'keep_channels = 0.1, keep_cast = "bf16"'
FOUR_OVER_SIX = 'cast = "nvfp4", candidates = [6, 4], choose = "mae"'
ALONE = 'element = "e2m1", scale = "e5m3"'
#: The keys of a cast at fprop.x, or a recipe.
MISTAKES = {
    'cast = "mxpf4"': "unknown cast 'mxpf4'; the nearest is 'mxfp4'",
    'cast = "nvfp4", roundin = "stochastic"': "unknown cast key 'roundin'; the nearest is 'rounding'",
    'element = "e2m9"': "unknown format 'e2m9'",
    'element = "e5m3"': "element = 'e5m3', but it is a format of scales",
    'element = "e2m1", scale = "none"': "scale = 'none', but narrow elements need one",
    'element = "bf16", block = 16': "scale = 'none', but a block shares a scale",
    'element = "bf16", block = 16, scale = "e4m3"': "scale = 'e4m3', but elements of more than a byte",
    'element = "e2m1", block = 0': "cast key block = 0, but it must be",
    'cast = "e4m3", block = "column"': 'block = \'column\', but it must be "tensor", "row", a number',
    # scales
    'cast = "mxfp4", scale_rule = "flor"': "unknown scale rule 'flor'; the nearest is 'floor'",
    f'{ALONE}, scale_rule = "ceil"': "a scale rule belongs to E8M0 scales only",
    'cast = "mxfp8", power_of_two = true': "power_of_two = True, but it cuts scales in fp32",
    'cast = "mxfp4", scale_target = 448': "scale_target = 448, but it is what scales in bf16, e4m3, e5m3 aim",
    'cast = "mxfp4", scale_rounding = "half-away"': "scale_rounding = 'half-away', but it belongs to",
    'cast = "e4m3", zero_scale = "one"': "zero_scale = 'one', but it belongs to scales in",
    'cast = "nvfp4", headroom = 3': "headroom = 3, but it must lie above 0 and not above 2",
    'cast = "mxfp4", scale_rule = "floor", headroom = 0.5': "but of the rules for E8M0 scales only rceil",
    'cast = "e4m3", history = 4, headroom = 0.5': "headroom = 0.5, but a history leaves room",
    'cast = "mxfp4", tensor_scale = "tensor"': "tensor_scale = 'tensor', but it stands over block scales",
    'cast = "nvfp4", block = "tensor"': "tensor_scale = 'tensor', but the block is the tensor",
    'cast = "nvfp4", tensor_scale = 24': "tensor_scale = '24', but this must be a whole number of blocks",
    'cast = "nvfp4-2d", tensor_scale = "row"': "tensor_scale = 'row', but a row needs several blocks",
    'm = {cast = "nvfp4", tensor_scale = "row"}': "'m': tensor_scale = 'row', but it belongs to GEMM",
    # candidates and corrections
    'cast = "nvfp4", candidates = [6, 4]': r"\(6, 4\), but a choice is missing; add choose = 'mae'",
    'cast = "nvfp4", choose = "mae"': "choose = 'mae', but there are no candidates; add",
    'cast = "nvfp4", candidates = [8, 6], choose = "mae"': "two or more numbers above 0 and not above 6",
    'cast = "nvfp4", candidates = [6, "4"], choose = "mae"': "candidates = .*, but it must be a list of",
    'cast = "mxfp4", candidates = [6, 4], choose = "mae"': "but they belong to scales in bf16, e4m3",
    f'{FOUR_OVER_SIX}, block = "row"': "they need blocks of a fixed size, such as 16",
    'cast = "mxfp4", correct = "projection"': "correct = 'projection', but it belongs to scales in bf16",
    'cast = "nvfp4", correct = "projection", hadamard = 16, block = 32': "it needs blocks of one row that",
    # the mean over tokens
    'fprop.w = {cast = "nvfp4", center = "tokens"}': "center = 'tokens', but a weight has no tokens",
    'cast = "bf16", center = "tokens"': "center = 'tokens', but it is for narrow elements",
    'cast = "nvfp4", center_cast = "nvfp4"': "no mean is taken away; add center = 'tokens'",
    'cast = "nvfp4", center = "tokens", center_cast = "bf16"': "it must be a cast with scales",
    'cast = "e4m3", center = "tokens", history = 4': "outliers and histories are of the tensor",
    'm = {cast = "mxfp4", center = "tokens"}': "'m': center = 'tokens', but state has no tokens",
    'saved = "operand"\nfprop.x = {cast = "mxfp4", center = "tokens"}': "but fprop.x has center",
    # kept channels
    'cast = "nvfp4", keep_channels = 1, keep_cast = "bf16"': "above 0 and below 1",
    'cast = "nvfp4", keep_channels = 0.1': "their cast is missing; add keep_cast",
    f'cast = "bf16", {KEEP}': "the cast itself is wide",
    'cast = "mxfp8", keep_channels = 0.1, keep_cast = "e4m3"': "wider than e4m3, such as bf16",
    f'cast = "e4m3", {KEEP}, history = 4': "leave out history",
    'cast = "nvfp4", keep_steps = 4': "there is nothing to choose",
    f'cast = "nvfp4", {KEEP}, keep_steps = 4, keep_every = 3': "at least keep_steps",
    f'fprop.w = {{cast = "nvfp4", {KEEP}}}': "give fprop.x the same",
    f'dgrad.w = {{cast = "nvfp4", {KEEP}}}': "in dgrad.w, but kept",
    f'fprop = {{cast = "nvfp4", hadamard = 16, {KEEP}}}': "mixes them",
    'wgrad.dy = {cast = "nvfp4", keep_cast = "bf16"}': "only one operand of wgrad has a cast for kept",
    f'fprop.x = {{cast = "nvfp4", {KEEP}}}\nwgrad = {{cast = "nvfp4", {KEEP}}}': "channels of wgrad.x; write",
    f'saved = "operand"\nfprop.x = {{cast = "nvfp4", {KEEP}}}': "has keep_channels, so its codes are not",
    f'saved = {{cast = "mxfp8", {KEEP}}}': "'saved': keep_channels = 0.1, but it belongs to GEMM operands",
    f'm = {{cast = "mxfp8", {KEEP}}}': "'m': keep_channels = 0.1, but",
    f'reduce = {{cast = "e4m3", {KEEP}}}': "gradients are added up in",
    # state
    'm = {cast = "e4m3", expand = true}': "expand = True, but it needs fp32 scales of blocks",
    'fprop.x = "dynamic8"': "cast 'dynamic8' is for state",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_keys_that_contradict_each_other_or_their_place(text):
    is_recipe = not text.startswith(("cast", "element"))
    with pytest.raises(UserError, match=MISTAKES[text]) as caught:
        parse_recipe(text if is_recipe else f"fprop.x = {{{text}}}", "mine")
    assert "\n" not in str(caught.value)


X = torch.ones(32, 32)
CALLS = {
    "needs a matrix, not a vector": lambda: ng.quantize(X[0], {"cast": "mxfp8", "block": [32, 32]}),
    "axis 2 of a tensor of shape": lambda: ng.quantize(X, "mxfp4", axis=2),
    "belongs to E8M0 scales only": lambda: ng.quantize(X, "e4m3", scale_rule="floor"),
    "takes random signs": lambda: ng.quantize(X, {"cast": "nvfp4", "hadamard": 16, "signs": "random"}),
    "'fp16-scaled' has no codes of a byte: it is for state": lambda: ng.quantize(X, "fp16-scaled"),
    **{
        f"{key} .*is for operands of a matmul; remove the key": (
            lambda key=key, value=value: QuantizedState(X.shape, make_cast({"cast": "e4m3", key: value}))
        )
        for key, value in {"hadamard": 16, "outliers": 0.99, "history": 4}.items()
    },
}


@pytest.mark.parametrize("sentence", CALLS)
def test_calls_that_cannot_be(sentence):
    with pytest.raises(UserError, match=sentence):
        CALLS[sentence]()
