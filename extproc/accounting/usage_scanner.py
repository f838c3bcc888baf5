"""Reads usage out of a response as it passes, in JSON or in server-sent events, split anywhere.

Nothing is parsed and nothing is kept but the last hundred bytes: usage is a few numbers, and their
names occur in a JSON text as keys only, since a quote inside a string is escaped. What was named
last counts, so that events which repeat it (SGLang's, Anthropic's) end with the final figures.

Where engines put it:

    usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens   chat and text completions
                                                                     (OpenAI, vLLM, SGLang)
    usage.input_tokens, usage.input_tokens_details.cached_tokens     /v1/responses
    usage.input_tokens, usage.cache_read_input_tokens,               /v1/messages (Anthropic)
        usage.cache_creation_input_tokens
    meta_info.prompt_tokens, meta_info.cached_tokens                 /generate (SGLang)

Of /v1/messages the prompt is the sum of the three: `input_tokens` leaves out what was read from the
cache, and what vLLM calls created in it.
"""

import re

from extproc.accounting.outcome import Usage

_PROMPT, _INPUT, _CACHED = b"prompt_tokens", b"input_tokens", b"cached_tokens"
_READ, _CREATED = b"cache_read_input_tokens", b"cache_creation_input_tokens"
_KEYS = b"|".join((_CACHED, _READ, _CREATED, _PROMPT, _INPUT))

# No prompt has a number of tokens with more digits, and no writer of JSON puts in more space.
_MAX_DIGITS = 9
_MAX_SPACE = 4

# Longest possible match with the byte that must follow its digits; as much has to be kept.
_TAIL_BYTES = 2 + max(map(len, _KEYS.split(b"|"))) + 2 * _MAX_SPACE + 1 + _MAX_DIGITS + 1

# Most pieces of a stream hold no such name; this is three times as fast to find out.
_HINT = b"_tokens"

_FIGURE = re.compile(
    rb'"(%b)"[ \t\r\n]{0,%d}:[ \t\r\n]{0,%d}([0-9]{1,%d})(?=[,}\] \t\r\n])'
    % (_KEYS, _MAX_SPACE, _MAX_SPACE, _MAX_DIGITS)
)


class UsageScanner:
    """Reads one response; what is told does not depend on how it is split."""

    def __init__(self) -> None:
        self._tail = b""
        self._figures: dict[bytes, int] = {}

    def read(self, piece: bytes) -> None:
        """Takes the next piece of the response's body."""
        seen = self._tail + piece
        if _HINT in seen:
            for key, digits in _FIGURE.findall(seen):
                self._figures[key] = int(digits)
        self._tail = seen[-_TAIL_BYTES:]

    @property
    def usage(self) -> Usage:
        """What was told so far."""
        found = self._figures
        if _PROMPT in found or _INPUT not in found:
            form = "prompt" if _PROMPT in found else ""
            return Usage(found.get(_PROMPT), found.get(_CACHED), form)
        if _CACHED in found:
            return Usage(found[_INPUT], found[_CACHED], "responses")
        cached = found.get(_READ)
        return Usage(found[_INPUT] + (cached or 0) + found.get(_CREATED, 0), cached, "messages")
