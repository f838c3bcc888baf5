"""Tiny models with several kinds of attention, and one with a draft, for engines that make up their
weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtools.simulator.settings import TINY_MODEL

_BASE: Mapping[str, Any] = json.loads((TINY_MODEL / "config.json").read_text())

WINDOW = 128

GEMMA: Mapping[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "query_pre_attn_scalar": 128,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

QWEN: Mapping[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

EAGLE: Mapping[str, Any] = {
    **{name: value for name, value in _BASE.items() if name != "architectures"},
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
}


def make_model(directory: Path, config: Mapping[str, Any]) -> Path:
    """Writes a model that has the tokenizer of the tiny one; returns its directory."""
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_MODEL / name, directory / name)
    same = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "dtype")
    shared = {name: _BASE[name] for name in same}
    (directory / "config.json").write_text(json.dumps({**shared, "rms_norm_eps": 1e-6, **config}))
    return directory
