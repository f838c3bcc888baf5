"""Whether a model has several kinds of attention, by its own config.json."""

from pathlib import Path
from typing import Any

import msgspec

from extproc.base.tokenizer_files import TokenizerFiles, read_file
from kvstate.undecodable import UNDECODABLE

# Most bytes of a config.json that is read.
MAX_CONFIG_BYTES = 1024 * 1024

FULL = "full_attention"

# Keys that only models with windows or states beside full attention have, in Hugging Face's
# transformers; `layer_types` names each layer's kind where it is given.
_KEYS = (
    "attn_layer_period",
    "full_attention_interval",
    "full_attn_idxs",
    "global_attn_every_n_layers",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "mamba_num_heads",
    "sliding_window_pattern",
)


def is_hybrid(config: bytes) -> bool:
    """Returns whether a config.json is of a model with several kinds of attention.

    False for bytes that are none: then it is not known.
    """
    try:
        read: dict[str, Any] = msgspec.json.decode(config, type=dict[str, Any])
    except UNDECODABLE:
        return False
    text = read.get("text_config")
    return any(_has_several(one) for one in (read, text) if isinstance(one, dict))


def _has_several(config: dict[str, Any]) -> bool:
    layers = config.get("layer_types")
    if isinstance(layers, list) and layers:
        return any(layer != FULL for layer in layers)
    return any(config.get(key) for key in _KEYS)


def has_hybrid_files(source: str) -> bool:
    """Returns whether the files of a model say that it is a hybrid; False if they are not found.

    source: where its tokenizer is, as configured.
    """
    try:
        directory: Path = TokenizerFiles.find(source).directory
        return is_hybrid(read_file(directory / "config.json", MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return False
