"""The models that are served."""

from dataclasses import dataclass

from extproc.config.key import key
from extproc.config.policy import POLICIES


@dataclass(frozen=True, slots=True)
class RemoteTokenizer:
    """A worker's own /tokenize instead of files here."""

    remote: bool = key(
        "true: workers of the model are asked at POST /tokenize; false is as no tokenizer",
        default=True,
    )
    deadline_ms: int = key(
        "milliseconds until their answer has to be there, then the pick is made by load alone;"
        " extproc.deadline_ms holds besides",
        200,
        minimum=1,
    )
    connections: int = key("connections to each worker at the most", 8, minimum=1)
    cache_bytes: int = key(
        "memory for answers to prompts that come again, in bytes; 0 keeps none", 64 * 1024 * 1024
    )


@dataclass(frozen=True, slots=True)
class Model:
    """A model as requests name it, and how its prompts become tokens."""

    name: str = key("the name that requests use")
    aliases: tuple[str, ...] = key("other names for the same model", ())
    lora: tuple[str, ...] = key("adapter names that requests may use as the model", ())
    tokenizer: str | RemoteTokenizer | None = key(
        "a directory, a tokenizer.json, a hub id found in the local Hugging Face cache, or"
        " {remote: true}; without one here the model is routed by load",
        None,
    )
    chat_template: str | None = key(
        "a Jinja file used instead of the model's own chat template", None
    )
    policy: str | None = key(
        "the rule for this model, instead of policy.name", None, choices=POLICIES
    )
