"""Arguments of chat templates that mean something else to the libraries between."""

# Those of transformers' apply_chat_template. In some engines they override the request itself, or
# change the form of the result.
RESERVED_ARGUMENTS = frozenset(
    (
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "tokenize",
        "truncation",
        "max_length",
        "padding",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
    )
)
