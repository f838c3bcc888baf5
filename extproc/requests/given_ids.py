"""Token ids that a request brings for its conversation, in place of what the engine would make.

Gateways that tokenize a prompt once hand its ids on so. Source: `_reused_prompt_token_ids` of
renderers/online_renderer.py in each release of vLLM from 0.27.0 to 0.33.0, and
`drop_prompt_token_ids_with_media` of openai/chat_completion/protocol.py (0.32, 0.33): chat
completions and messages, and responses but for gpt-oss, read them from `kv_transfer_params`; the
engine neither truncates them nor adds special tokens. Earlier releases do not read them; SGLang has
a field of its own (`sglang_chat`).
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.dialect import Dialect, GivenIdsRule
from extproc.requests.prompt import NULL, TokenIds, is_filled, is_given, token_ids
from kvstate.undecodable import UNDECODABLE

# Kinds of parts that are text, and keys that make a part none. Source: has_non_text_content of
# renderers/chat_utils (vLLM 0.32 and 0.33).
_TEXT_PARTS = frozenset(
    ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
)
_MEDIA_KEYS = frozenset(
    (
        "audio_embeds",
        "audio_url",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_image",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    )
)


class _Transfer(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = NULL


_transfer = msgspec.json.Decoder(_Transfer | None)


def given_ids(
    transfer: msgspec.Raw,
    dialect: Dialect | None,
    messages: Iterable[dict[str, Any]],
    *,
    echo: object = False,
    is_response: bool = False,
) -> TokenIds | None:
    """Returns the ids that are a conversation's prompt; None if the engine renders it.

    transfer: the request's kv_transfer_params. messages: in the form of chat completions.
    is_response: whether it is a response, whose ids are ignored for gpt-oss.

    Raises:
        RequestError: the engine refuses them, or it is not known what it does with them.
        msgspec.DecodeError: kv_transfer_params is something else.
    """
    if not is_given(transfer):
        return None
    ids = (_transfer.decode(transfer) or _Transfer()).prompt_token_ids
    if not is_given(ids):
        return None
    if dialect is None or dialect.is_foreign:
        raise RequestError("unsupported_kv_transfer")
    rule = dialect.given_ids
    if rule is GivenIdsRule.IGNORED or (rule is GivenIdsRule.TAKEN and not is_filled(ids)):
        return None
    if rule is GivenIdsRule.CHECKED and (echo or any(map(_has_media, messages))):
        if is_response:  # whether its parts are looked at, their kinds' validation decides
            raise RequestError("unsupported_kv_transfer")
        return None
    try:
        return TokenIds(token_ids(ids), is_response)
    except UNDECODABLE:
        raise RequestError("bad_request") from None


def _has_media(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and not all(map(_is_text, content))


def _is_text(part: object) -> bool:
    if not isinstance(part, dict):
        return True
    kind = part.get("type", "text")
    return isinstance(kind, str) and kind in _TEXT_PARTS and _MEDIA_KEYS.isdisjoint(part)
