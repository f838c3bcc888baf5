"""Which engine a worker runs, in which release, and behind which front end."""

import re
from typing import NamedTuple

# The engines whose releases are known by name, as configurations and pods write them.
VLLM, SGLANG, TRTLLM = "vllm", "sglang", "trtllm"
ENGINES = (VLLM, SGLANG, TRTLLM)

# What serves an engine's HTTP, reads requests, and renders and tokenizes their prompts.
PYTHON, RUST = "python", "rust"
FRONT_ENDS = (PYTHON, RUST)

# Who says which engine a worker runs: the configuration, its pod, or the worker itself.
CONFIGURED, ANNOTATED, LEARNED = "configured", "annotation", "learned"

_VERSION = re.compile(r"\Av?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?![0-9])")


class Release(NamedTuple):
    """A release's number. Pre-releases and local builds count as the release that they precede."""

    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class Engine(NamedTuple):
    """An engine, its release, and its front end. name: one of ENGINES; front_end: of FRONT_ENDS."""

    name: str
    release: Release
    front_end: str = PYTHON

    def __str__(self) -> str:
        known = f"{self.name} {self.release}"
        return f"{known}, Rust front end" if self.front_end == RUST else known


class PromptArguments(NamedTuple):
    """What SGLang was started with that changes its prompts; None for what it was not given.

    chat_template: the name of one of its own, or the path of a file on the worker.
    hf_chat_template_name: which of a tokenizer's several templates is used.
    default_chat_template_kwargs: the JSON of an object, added to every request.
    enable_multimodal: whether models that can are to be served with media.
    """

    chat_template: str | None = None
    hf_chat_template_name: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    default_chat_template_kwargs: str | None = None
    enable_multimodal: bool | None = None


def changes_prompts(arguments: PromptArguments | None, *, is_given: bool) -> bool:
    """Returns whether arguments make other prompts than the model's template does.

    is_given: whether the router was given the template that the operator gave to the engine.
    """
    if arguments is None:
        return False
    has_own = arguments.chat_template is not None and not is_given
    return has_own or arguments.hf_chat_template_name is not None


def release_of(version: str) -> Release | None:
    """Returns the release that a version names, None if it is not understood.

    Source: the versions that engines tell, as in "0.32.0", "0.32.1rc1.dev3+g1a2b3c4.cpu", "v0.5.9".
    """
    found = _VERSION.match(version)
    if found is None:
        return None
    major, minor, patch = found.groups(default="0")
    return Release(int(major), int(minor), int(patch))
