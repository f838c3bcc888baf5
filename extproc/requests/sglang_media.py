"""Media parts of chat completions as SGLang reads them.

Source: SGLang 0.5.9 to 0.5.23, srt/entrypoints/openai/protocol.py and serving_chat.py (the parts,
and the fields of a request by which its processors read them), and srt/parser/
jinja_template_utils.py (what templates get of them: the kind, and nothing else).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.requests.media import MEDIA_PARTS
from extproc.requests.prompt import MediaPart

# Kinds of media parts that chat completions take.
_KINDS = frozenset(("image_url", "input_audio", "audio_url", "video_url"))

# A part that names a tool, by which templates write its definition; from 0.5.11 on.
TOOL_REFERENCE = "tool_reference"

# A field of parts of which the engine takes the smallest value for all items of a request.
_PATCHES = "max_dynamic_patch"


class MediaFields(msgspec.Struct, frozen=True):
    """The fields of a chat completion by which the engine reads its media."""

    images_config: Any = None
    video_config: Any = None
    mm_processor_kwargs: Any = None
    use_audio_in_video: Any = None


def media_part(part: object) -> dict[str, Any] | None:
    """Returns a media part as templates get it, None if it is no media part."""
    match part:
        case {"type": str(kind)} if kind in _KINDS:
            return {"type": MEDIA_PARTS[kind]}
    return None


def media_parts_of(messages: Sequence[Mapping[str, Any]]) -> tuple[MediaPart, ...]:
    """Returns the media parts of messages in order, as the engine reads them."""
    contents = [one.get("content") for one in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    media = [one for one in parts if media_part(one) is not None]
    return tuple([(MEDIA_PARTS[one["type"]], _read(one)) for one in media])


def _read(part: dict[str, Any]) -> dict[str, Any]:
    """Returns a part in one form, whichever API it is from.

    It has no `uuid`, which this engine does not take for an item.
    """
    known = {key: value for key, value in part.items() if key not in ("uuid", "detail")}
    image = known.get("image_url")
    if image is None:
        return known
    fields = image if isinstance(image, dict) else {"url": image}
    detail = fields.get("detail") or part.get("detail") or "auto"
    return {**known, "image_url": {**fields, "detail": detail}}


def has_media(message: Mapping[str, Any]) -> bool:
    """Returns whether a message, as templates get it, has a media part."""
    content = message["content"]
    return isinstance(content, list) and any(
        part["type"] not in ("text", TOOL_REFERENCE) for part in content
    )


def arguments_of(fields: MediaFields, media: Sequence[MediaPart]) -> Mapping[str, Any]:
    """Returns the arguments by which the engine reads a request's media.

    They are never empty, so that an item of another engine is another item.
    """
    by_name = {name: getattr(fields, name) for name in MediaFields.__struct_fields__}
    given = {name: value for name, value in by_name.items() if value}
    patches = sorted({str(value) for _, part in media for value in _patches(part)})
    return {"engine": "sglang", _PATCHES: patches, **given}


def _patches(part: Mapping[str, Any]) -> list[object]:
    """Returns the values of a field that one part sets for all, wherever it stands in the part."""
    places = [part, *(value for value in part.values() if isinstance(value, dict))]
    return [place[_PATCHES] for place in places if place.get(_PATCHES) is not None]
