"""What code writes to a weight: one function for each idiom, run on a narrow model and on its fp32 twin.

Each changes a model, and returns its weights, which are rounded to the format that stores them.
"""

import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from nn.idioms import weights


def halved(state):
    return {k: 0.5 * v for k, v in state.items()}


#: To the weight of a layer.
WRITES_TO_WEIGHT = {
    "set_to_zero": lambda w: w.mul_(0),
    "initialize_normal": lambda w: torch.manual_seed(5) and w.data.normal_(std=0.02),
    "initialize_orthogonal": lambda w: torch.manual_seed(5) and nn.init.orthogonal_(w),
    "copy_into_data": lambda w: w.data.copy_(w.flip(0).clone()),
    "output_argument": lambda w: torch.mul(w.clone(), 0.5, out=w),
}
WRITES_TO_MODEL = {
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        0.5 * nn.utils.parameters_to_vector(m.parameters()), m.parameters()
    ),
    "foreach_scale": lambda m: torch._foreach_mul_(list(m.parameters()), 0.5),
    "load_by_assignment": lambda m: m.load_state_dict(halved(m.state_dict()), assign=True),
    "load_by_copy": lambda m: m.load_state_dict(halved(m.state_dict())),
}


def write(function):
    WRITES_TO_MODEL[function.__name__] = function
    return function


@write
def write_a_slice(m):
    m[0].weight[:, :4] = 0
    m[0].weight.data[0].zero_()
    m[2].weight.view(-1)[::3] = 0.01


@write
def write_through_a_state_dict(m):
    for name, t in m.state_dict().items():
        t.copy_(0.5 * m.get_parameter(name))


@write
def distributed_checkpoint(m):
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be here
        dcp.save({"model": halved(get_model_state_dict(m))}, checkpoint_id=folder, no_dist=True)
        state = {"model": get_model_state_dict(m)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(m, state["model"])


@write
def averaged_model(m):
    averaged = torch.optim.swa_utils.AveragedModel(m)
    for p in m.parameters():
        p.copy_(0.5 * p)
    for _ in range(2):
        averaged.update_parameters(m)
    m.load_state_dict(averaged.module.state_dict())


def returning_weights(function):
    def run(m):
        with torch.no_grad():
            function(m)
        return weights(m)

    return run


WRITES = {
    name: returning_weights(lambda m, write=write: write(m[0].weight))
    for name, write in WRITES_TO_WEIGHT.items()
} | {name: returning_weights(write) for name, write in WRITES_TO_MODEL.items()}
