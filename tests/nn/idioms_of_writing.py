"""What code writes to a weight: one function for each idiom, run on a narrow model and on its fp32 twin.

Each changes a model, and returns its weights, which are rounded to the format that stores them.
"""

import copy
import io
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from nn.idioms import weights

WRITES = {}


def write(function):
    def run(m):
        with torch.no_grad():
            function(m)
        return weights(m)

    WRITES[function.__name__] = run
    return function


@write
def set_to_zero(m):
    m[0].weight.mul_(0)


@write
def fill(m):
    m[0].weight.fill_(0.5)


@write
def initialize_constant(m):
    nn.init.constant_(m[0].weight, 0.25)


@write
def initialize_normal(m):
    torch.manual_seed(5)
    m[0].weight.data.normal_(std=0.02)


@write
def initialize_xavier(m):
    torch.manual_seed(5)
    nn.init.xavier_uniform_(m[0].weight)


@write
def initialize_truncated(m):
    torch.manual_seed(5)
    nn.init.trunc_normal_(m[0].weight, std=0.02)


@write
def initialize_orthogonal(m):
    torch.manual_seed(5)
    nn.init.orthogonal_(m[0].weight)


@write
def copy_into_data(m):
    m[0].weight.data.copy_(m[0].weight.flip(0).clone())


@write
def assign_data(m):
    m[0].weight.data = m[0].weight.data * 0.5


@write
def write_a_slice(m):
    m[0].weight[:, :4] = 0
    m[0].weight.data[0].zero_()
    m[2].weight.view(-1)[::3] = 0.01


@write
def scale(m):
    m[0].weight.mul_(0.75)
    m[2].weight.div_(2)


@write
def clamp(m):
    m[0].weight.clamp_(-0.05, 0.05)


@write
def sharpness_aware_minimization(m):
    kept = weights(m)
    m[0].weight.add_(m[0].weight.sign(), alpha=0.01)
    m[0].weight.copy_(kept[0])


@write
def merge_an_adapter(m):
    a, b = (torch.randn(*s, generator=torch.Generator().manual_seed(2)) for s in ((4, 32), (64, 4)))
    m[0].weight.data += 0.05 * b @ a


@write
def vector_to_parameters(m):
    vector = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(0.5 * vector, m.parameters())


@write
def foreach_scale(m):
    torch._foreach_mul_(list(m.parameters()), 0.5)


@write
def write_through_a_state_dict(m):
    for name, t in m.state_dict().items():
        t.copy_(0.5 * m.get_parameter(name))


@write
def average_by_state_dict_values(m):
    other = {k: torch.ones_like(v) for k, v in m.state_dict().items()}
    for e, v in zip(m.state_dict().values(), other.values(), strict=True):
        e.copy_(e * 0.75 + 0.25 * v)


@write
def lerp_through_a_state_dict(m):
    for t in m.state_dict().values():
        t.lerp_(torch.ones_like(t), 0.25)
        if t.ndim == 2:
            t[0].zero_()


@write
def load_by_assignment(m):
    m.load_state_dict({k: 0.5 * v for k, v in m.state_dict().items()}, assign=True)


@write
def load_by_copy(m):
    m.load_state_dict({k: 0.5 * v for k, v in m.state_dict().items()})


@write
def distributed_checkpoint(m):
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be here
        halved = {k: 0.5 * v for k, v in get_model_state_dict(m).items()}
        dcp.save({"model": halved}, checkpoint_id=folder, no_dist=True)
        state = {"model": get_model_state_dict(m)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(m, state["model"])


@write
def output_argument(m):
    torch.mul(m[0].weight.clone(), 0.5, out=m[0].weight)


@write
def through_a_pickle(m):
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    m.load_state_dict(loaded.state_dict())


@write
def averaged_model(m):
    averaged = torch.optim.swa_utils.AveragedModel(m)
    for p in m.parameters():
        p.copy_(0.5 * p)
    for _ in range(2):
        averaged.update_parameters(m)
    m.load_state_dict(averaged.module.state_dict())


@write
def exponential_average_of_a_copy(m):
    ema = copy.deepcopy(m)
    for e, p in zip(ema.parameters(), m.parameters(), strict=True):
        e.copy_(0.5 * p)
        e.mul_(0.75).add_(p, alpha=0.25)
    m.load_state_dict(ema.state_dict())
