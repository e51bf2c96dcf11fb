"""Rotary positions in a `config.json`: plain, or scaled as in Llama 3.1."""

from collections.abc import Mapping
from typing import Any

from narrowgauge.checkpoint.interop.hf_values import needed, number, require
from narrowgauge.errors import UserError
from narrowgauge.models import ModelConfig


def rope_from(values: Mapping[str, Any], where: str, theta: float) -> dict[str, Any]:
    """Our keys for rotary positions; `theta` is the family's default, `where` begins each error message."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        raise UserError(
            f"{where}: rotary positions that differ from layer to layer; give a model with one kind"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rope = {"rope_theta": number(scaling.get("rope_theta", values.get("rope_theta", theta)))}
    require({**values, **scaling}, "partial_rotary_factor", (1.0, None), where)
    if kind == "default":
        return rope
    if kind != "llama3":
        raise UserError(
            f"{where}: rotary positions scaled by {kind!r}, and this model knows 'default' and 'llama3'; "
            "give a model with one of these"
        )
    return rope | {
        "rope_factor": number(needed(scaling, "factor", where)),
        "rope_low_freq_factor": number(needed(scaling, "low_freq_factor", where)),
        "rope_high_freq_factor": number(needed(scaling, "high_freq_factor", where)),
        "rope_original_positions": needed(scaling, "original_max_position_embeddings", where),
    }


def rope_to(config: ModelConfig) -> dict[str, Any]:
    """The keys for rotary positions, in the form that all versions of transformers read."""
    scaling = None
    if config.rope_factor != 1:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_positions,
        }
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}
