"""A model that came from elsewhere, in our names: what every reader of this room returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from narrowgauge.checkpoint.interop.name_map import check_shapes, external_shapes
from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig


@dataclass(frozen=True)
class ExternalModel:
    """Configuration and float32 weights; a tied head stands under both of its names, as one tensor."""

    kind: str  #: "hf", "llmc" or "megatron"
    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]
    tokenizer: Path | None = None  #: of a tokenizer.json, where it came with one


def external_model(
    kind: str,
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    origin: Path,
    tokenizer: Path | None = None,
) -> ExternalModel:
    """A foreign model whose tensors have been compared with its configuration."""
    if config.tied_head:
        tensors["head.weight"] = tensors["embedding.weight"]
    check_shapes(config, tensors, str(origin))
    assert tensors.keys() == external_shapes(config).keys()
    return ExternalModel(kind, config, tensors, tokenizer)


def require_layers(config: ModelConfig, tensors: int, origin: Path) -> None:
    """Refuse a configuration of more layers than there are tensors, before anything is made for each."""
    if config.layers > tensors:
        raise UserError(
            f"{origin}: its configuration has {config.layers} layers, and there are {tensors} tensors; "
            "give weights and configuration of one model"
        )
