"""Chat templates: a model's own Jinja file turns a conversation into its prompt text.

The text is what vLLM makes of it: its parsing of messages, then transformers' apply_chat_template.
Where releases differ, it is not claimed. A client's template is never run.
"""

import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes

from extproc.errors import RequestError
from extproc.requests.continuation import tagged, up_to_final, up_to_tag
from extproc.requests.message_shapes import (
    MEDIA_MARK,
    Messages,
    flat,
    has_media,
    in_parts,
    marked,
    texts_before_media,
)
from extproc.templates.content_format import content_formats
from extproc.templates.template_environment import Sandbox, rendered

# A rendering takes under a millisecond; one that takes this long is given up.
BUDGET_SECONDS = 0.25

# What a model thought before an answer, under the names that clients send back.
_REASONING = frozenset(("reasoning", "reasoning_content"))


class ChatTemplate:
    """One compiled template; safe to use from several threads.

    special_tokens: by the names templates know them (bos_token, eos_token, ...).
    monotonic: seconds, for the budget of a rendering.
    now: local time, for templates that print the date.

    Raises:
        ValueError: the source is no template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = Sandbox(now)
        try:
            tree = environment.parse(source)
            self._formats = content_formats(tree)
            self._reads_reasoning = "reasoning" in source or _names(tree, "thinking")
            self._template = environment.compiled(tree)
        except (jinja2.TemplateError, SyntaxError) as error:
            raise ValueError(f"not a Jinja template: {error}") from None
        self._reads_effort = "reasoning_effort" in source or "enable_thinking" in source
        self._knows_developers = any(name in source for name in ('"developer"', "'developer'"))
        self._reads_content = "content" in source
        self._special_tokens = dict(special_tokens)
        self._monotonic = monotonic

    def render(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        has_reasoning_effort: bool = False,
        budget_seconds: float = BUDGET_SECONDS,
    ) -> str:
        """The prompt text of a conversation.

        has_reasoning_effort: whether the request sets it beside the variables.
        budget_seconds: how long it may take, however often the template runs.

        Raises:
            RequestError: the template refuses the conversation, as an engine would, or takes too
                long; or it reads what engines, and their versions, hand it differently; or there
                is media in it.
        """
        self._refuse_what_differs(messages, has_reasoning_effort)
        plain = messages
        if not _are_texts(messages):
            if any(map(has_media, messages)):
                raise RequestError("unsupported_media")
            plain = [flat(message) for message in messages]
        end = self._monotonic() + budget_seconds
        text, *others = [
            self._text([in_parts(one) for one in messages] if parts else plain, variables, end)
            for parts in self._formats
        ]
        if any(other != text for other in others):
            raise RequestError("unsupported_content_format")
        return text

    def render_until_media(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        added_tokens: Collection[str],
        has_reasoning_effort: bool = False,
    ) -> str:
        """The part of a conversation's prompt text that is certain before its first media.

        What the engine renders and what is rendered with a mark for every media agree up to there.
        The engine's processor puts media tokens in the place of the placeholders that the template
        wrote, so the text before the first of them is also the engine's, unless a client wrote one.

        added_tokens: the tokenizer's, among which the model's placeholders are.

        Raises:
            RequestError: as `render`; or the template expects texts, before which engines write
                placeholders of their own; or a message holds the text of an added token.
        """
        self._refuse_what_differs(messages, has_reasoning_effort)
        if self._formats != {True} or variables.get("continue_final_message"):
            raise RequestError("unsupported_media")
        if any(token in text for text in texts_before_media(messages) for token in added_tokens):
            raise RequestError("unsupported_media")
        shaped = [in_parts(message) for message in messages]
        end = self._monotonic() + BUDGET_SECONDS
        theirs = self._rendered(shaped, variables, end)
        ours = self._rendered([marked(message) for message in shaped], variables, end)
        return _common_prefix(theirs, ours.partition(MEDIA_MARK)[0])

    def _refuse_what_differs(self, messages: Messages, has_reasoning_effort: bool) -> None:  # noqa: FBT001
        if has_reasoning_effort and self._reads_effort:
            raise RequestError("unsupported_reasoning_effort")
        if self._reads_reasoning and not all(map(_REASONING.isdisjoint, messages)):
            raise RequestError("unsupported_reasoning")
        if not self._knows_developers and "developer" in [one.get("role") for one in messages]:
            raise RequestError("unsupported_developer_role")

    def _text(self, shaped: Messages, variables: Mapping[str, Any], end: float) -> str:
        if not variables.get("continue_final_message"):
            return self._rendered(shaped, variables, end)
        return self._continued(shaped, variables, end)

    def _rendered(self, messages: Messages, variables: Mapping[str, Any], end: float) -> str:
        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        context["messages"] = messages
        return rendered(self._template, context, self._monotonic, end)

    def _continued(self, messages: Messages, variables: Mapping[str, Any], end: float) -> str:
        """The text up to the end of the final message, if both of transformers' ways agree."""
        final, open_ended = tagged(messages[-1])
        if not self._reads_content:
            raise RequestError("template_failed")
        with_tag = self._rendered([*messages[:-1], open_ended], variables, end)
        plain = self._rendered(messages, variables, end)
        text = up_to_tag(with_tag, final)
        if text != up_to_final(plain, final):
            raise RequestError("unsupported_continuation")
        return text


def _are_texts(messages: Messages) -> bool:
    """Whether all contents are plain texts, as nearly always."""
    return {type(message.get("content")) for message in messages} <= {str}


def _names(tree: nodes.Template, key: str) -> bool:
    """Whether a template names a key of something, by attribute or by text."""
    attributes = (node.attr for node in tree.find_all(nodes.Getattr))
    texts = (node.value for node in tree.find_all(nodes.Const))
    return key in (*attributes, *texts)


def _common_prefix(one: str, other: str) -> str:
    shared, longest = 0, min(len(one), len(other))
    while shared < longest:
        middle = (shared + longest + 1) // 2
        if other.startswith(one[shared:middle], shared):
            shared = middle
        else:
            longest = middle - 1
    return one[:shared]
