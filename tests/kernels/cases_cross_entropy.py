"""What is compiled for GPUs that are not here: rows of GPT-2's and Llama 3's vocabulary."""

from unittest.mock import patch

import torch

from narrowgauge.formats import format
from narrowgauge.kernels.amax import DelayedScale
from narrowgauge.kernels.triton import cross_entropy, swiglu_codes


def of(width, dtype, ignored, z_loss=0.0):
    z_TV, y_T = torch.empty(4, width, dtype=dtype), torch.empty(4, dtype=torch.long)
    _, stats_2T = cross_entropy.losses(z_TV, y_T, ignored)
    cross_entropy.losses(z_TV, y_T, ignored, torch.empty(()), z_loss)
    cross_entropy.write_gradients(z_TV, y_T, stats_2T, torch.empty(()), ignored, z_TV, z_loss)


def codes(width, ignored, converts=False):
    """Gradients as FP8 codes, under both kinds of scales; `converts`: by the GPU's own instruction."""
    z_TV, y_T = torch.empty(64, width, dtype=torch.bfloat16), torch.empty(64, dtype=torch.long)
    largest = torch.zeros(())
    _, stats_2T = cross_entropy.losses(z_TV, y_T, ignored, largest=largest)
    delayed = DelayedScale(torch.ones(()), torch.ones(()))
    with patch.object(swiglu_codes, "is_converted", lambda *_: converts):
        for scale in (None, delayed):
            cross_entropy.launch_gradient_codes(
                z_TV, y_T, stats_2T, torch.ones(()), largest, ignored, format("e5m2"), scale
            )


CASES = [
    lambda: of(128256, torch.bfloat16, None),
    lambda: of(50257, torch.bfloat16, -100),
    lambda: of(50257, torch.float16, None),
    lambda: of(50257, torch.float32, -100),
    lambda: of(50257, torch.bfloat16, -100, 1e-4),
    lambda: codes(50257, -100),
    lambda: codes(128256, None, converts=True),
]
