"""Tiny models whose conversations vLLM writes in code, for engines that make up their weights."""

import base64
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from extproc.renderers.deepseek import ASSISTANT, BOS, EOS, USER
from extproc.renderers.harmony_format import CONTROLS
from extproc.tokenizing.byte_pairs import byte_level_tokenizer
from kvtools.simulator.settings import TINY_MODEL
from tests.engines.hybrid_models import EAGLE as TINY_LLAMA
from tests.engines.vllm_engine import PYTHON, Model
from tests.extproc.small_models import write_model


class Written(NamedTuple):
    """A model in code. served: by the engine. directory: what the router is given."""

    served: Model
    directory: Path


CONTEXT_TOKENS = 4096

# The pattern of the vocabulary o200k, and its ids that no text has.
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}*{_SMALL}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_TEXT_IDS, _ALL_IDS = 199_998, 201_088

# The library that vLLM writes and tokenizes with; it has the vocabulary in itself.
_RANKS = f"""
import base64, openai_harmony
encoding = openai_harmony.load_harmony_encoding("HarmonyGptOss")._inner
for one in range({_TEXT_IDS}):
    print(base64.b64encode(bytes(encoding.decode_bytes([one]))).decode())
"""

_GPT_OSS: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": _ALL_IDS,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131_072,
    "attention_bias": True,
    "eos_token_id": CONTROLS["<|call|>"],
    "pad_token_id": 199_999,
}


def has_harmony() -> bool:
    """Returns whether the engine's environment has the library with gpt-oss's vocabulary."""
    asked = [PYTHON, "-c", "import openai_harmony"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def gpt_oss(directory: Path) -> Written:
    """Writes a gpt-oss with the vocabulary of the library in the engine's environment."""
    done = subprocess.run([PYTHON, "-c", _RANKS], check=True, capture_output=True)
    ranks = {base64.b64decode(line): rank for rank, line in enumerate(done.stdout.split())}
    named = {number: name for name, number in CONTROLS.items()}
    ids = range(_TEXT_IDS, max(named) + 1)
    special = {named.get(one, f"<|reserved_{one}|>"): one for one in ids}
    directory.mkdir()
    byte_level_tokenizer(ranks, _O200K, special).save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|call|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps(_GPT_OSS))
    return Written(Model(directory, CONTEXT_TOKENS), directory)


def mistral(directory: Path) -> Written:
    """Writes a model with a small tekken.json of version 13."""
    directory.mkdir()
    write_model("mistral-v13", directory)
    config = {**_llama(4_096), "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config["sliding_window"] = None  # its class has one
    (directory / "config.json").write_text(json.dumps(config))
    options = {"--tokenizer-mode": "mistral", "--config-format": "hf"}
    return Written(Model(directory, CONTEXT_TOKENS, options), directory)


def deepseek(directory: Path, architecture: str, tokenizer_mode: str) -> Written:
    """Writes a Llama that is rendered as DeepSeek's model of an architecture.

    Its own layers need a GPU. The engine renders as its tokenizer mode says; the router takes the
    architecture for it.
    """
    names = (BOS, EOS, USER, ASSISTANT, "<think>", "</think>")
    content = json.loads((TINY_MODEL / "tokenizer.json").read_text())
    first = len(content["model"]["vocab"]) + len(content["added_tokens"])
    for number, name in enumerate(names):
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append(
            {"id": first + number, "content": name, "special": True, **plain}
        )
    served, shown = directory / "served", directory / "shown"
    for one, named in ((served, "LlamaForCausalLM"), (shown, architecture)):
        one.mkdir(parents=True)
        (one / "tokenizer.json").write_text(json.dumps(content))
        shutil.copy(TINY_MODEL / "tokenizer_config.json", one)
        config = {**_llama(first + 64), "architectures": [named]}
        (one / "config.json").write_text(json.dumps(config))
    tools = {"--tool-call-parser": "hermes", "--enable-auto-tool-choice": ""}
    options = {"--tokenizer-mode": tokenizer_mode, **tools}
    return Written(Model(served, CONTEXT_TOKENS, options), shown)


def _llama(ids: int) -> dict[str, Any]:
    return {**TINY_LLAMA, "vocab_size": ids, "max_position_embeddings": CONTEXT_TOKENS}
