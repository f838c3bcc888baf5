"""Model directories without tokenizer.json, small ones: the first 1,200 ranks of a real vocabulary.

`judged.json` beside the renderers' tests has requests, and the ids that vLLM 0.32.0 with
transformers 5.19, mistral-common 1.13.1 and tiktoken 0.14 makes of them for these models; None
where it refuses. The ids of Kimi K2 are those of its checkpoint's own code, with the template here.
"""

import json
from pathlib import Path
from typing import Any

from extproc.tokenizing.split_patterns import KIMI, TEKKEN

HERE = Path(__file__).parent / "renderers"
JUDGED: dict[str, Any] = json.loads((HERE / "judged.json").read_text())
RANKS = (HERE / "small.tiktoken").read_text()

CONTROLS = 40
_NAMES = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
_MORE = {
    32: "[ARGS]",
    33: "[CALL_ID]",
    34: "[THINK]",
    35: "[/THINK]",
    36: "[MODEL_SETTINGS]",
    37: "[/MODEL_SETTINGS]",
}
EFFORTS = {"type": "enum", "values": ["none", "high"], "accepts_none": True, "default": "none"}

KIMI_TEMPLATE = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}<|tool_call_begin|>{{ call.id }}
{{- call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

# What is read of a checkpoint's code; a stand-in, which runs nowhere.
_FIRST, _, _REST = KIMI.partition("|[^")
KIMI_CODE = f"""
class TikTokenTokenizer:
    num_reserved_special_tokens = 256
    pat_str = "|".join({[_FIRST, "[^" + _REST]!r})

    def __init__(self, base):
        self.special_tokens = range(base, base + self.num_reserved_special_tokens + 2)

    def encode(self, text):
        TIKTOKEN_MAX_ENCODE_CHARS = 400_000
        MAX_NO_WHITESPACES_CHARS = 25_000

    def apply_chat_template(self, tools):
        return deep_sort_dict(tools)
"""

_KIMI_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}


def tekken(version: str) -> dict[str, Any]:
    """Returns the content of a tekken.json."""
    lines = [line.split(" ") for line in RANKS.splitlines()]
    vocab = [{"rank": int(rank), "token_bytes": token, "token_str": None} for token, rank in lines]
    config = {
        "pattern": TEKKEN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + CONTROLS,
        "default_num_special_tokens": CONTROLS,
        "version": version,
    }
    found: dict[str, Any] = {"config": config, "vocab": vocab}
    if version != "v3":
        names = [*_NAMES, *(_MORE.get(one, f"<SPECIAL_{one}>") for one in range(20, CONTROLS))]
        found["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ]
    if version == "v15":
        found["model_settings_builder"] = {"reasoning_effort": EFFORTS}
    return found


def kimi_settings() -> dict[str, Any]:
    """Returns the content of Kimi's tokenizer_config.json."""
    first = len(RANKS.splitlines())
    named = {str(first + place): {"content": name} for place, name in _KIMI_NAMES.items()}
    return {"added_tokens_decoder": named, "bos_token": "[BOS]", "unk_token": "[UNK]"}


def write_model(name: str, directory: Path) -> Path:
    """Writes the files of a model that `judged.json` names, and returns its directory."""
    if name.startswith("mistral-"):
        content = json.dumps(tekken(name.removeprefix("mistral-")))
        (directory / "tekken.json").write_text(content)
        return directory
    (directory / "tiktoken.model").write_text(RANKS)
    (directory / "tokenization_kimi.py").write_text(KIMI_CODE)
    (directory / "tokenizer_config.json").write_text(json.dumps(kimi_settings()))
    (directory / "chat_template.jinja").write_text(KIMI_TEMPLATE)
    return directory
