"""The fields of content parts that vLLM's request models name, for parts of any kind.

What they name is left out of the parts that templates get, whatever the kind; all else is kept.

Source: ChatCompletionContentPartParam of vLLM 0.33.0 (renderers/chat_utils/types.py), and of the
OpenAI library.
"""

PART_FIELDS = frozenset(
    (
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    )
)
