"""Whether SGLang takes a model for multimodal, so that it tokenizes its conversations as texts.

The text of a conversation then gets the special tokens that a tokenizer adds by itself, besides
those that the template writes.

Source: SGLang 0.5.9 and 0.5.23, srt/configs/model_config.py (`multimodal_model_archs`,
`mm_disabled_models`), and srt/entrypoints/openai/serving_chat.py of the releases between.
"""

from collections.abc import Mapping
from typing import Any

# Architectures that all these releases take for multimodal. Whether others are depends on the
# release, or on the model's other settings.
_MULTIMODAL = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        "Ernie4_5_VLMoe",
        "Gemma3",
        "Gemma3n",
        "Glm4v",
        "Glm4vMoe",
        "GlmAsr",
        "GlmOcr",
        "InternS1",
        "InternS1Pro",
        "JetVLM",
        "KimiK25",
        "KimiVL",
        "LightOnOCR",
        "Llama4",
        "Llava",
        "Mistral3",
        "Mllama",
        "NVILA",
        "NVILALite",
        "PaddleOCRVL",
        "Pixtral",
        "Qwen2Audio",
        "Qwen2VL",
        "Qwen2_5_VL",
        "Qwen3OmniMoe",
        "Qwen3VL",
        "Qwen3VLMoe",
        "Qwen3_5",
        "Qwen3_5Moe",
        "Step3VL",
        "StepVL",
    )
)

# Those that are not, unless the engine is started with --enable-multimodal.
_BY_ARGUMENT = frozenset(
    f"{name}ForConditionalGeneration" for name in ("Gemma3", "Llama4", "Step3VL")
)


def is_multimodal(config: Mapping[str, Any], *, enabled: bool | None) -> bool:
    """Returns whether SGLang is known to take a model for multimodal.

    config: of config.json. enabled: the engine's --enable-multimodal, None if it is not given.
    """
    match config.get("architectures"):
        case [str(architecture), *_]:
            pass
        case _:
            return False
    if architecture not in _MULTIMODAL or config.get("language_model_only"):
        return False
    return architecture not in _BY_ARGUMENT if enabled is None else enabled
