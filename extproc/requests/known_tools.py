"""Lists of tools by the bytes that were sent, each of which is read once.

An agent sends the same tools with each of its requests, often a quarter of all bytes. Known ones
are neither decoded nor converted again, and their JSON is written once.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from kvstate.scan import marks

# So many lists are known. Longer ones, and those of more values, are read each time: a value of a
# few bytes may take hundreds in memory.
MOST_LISTS = 32
MAX_BYTES = 128 * 1024
MOST_MARKS = 8_192  # commas and opening brackets, also those in texts

Tools = list[dict[str, Any]]

_tools = msgspec.json.Decoder(Tools | None)


class PrintedTool(dict[str, Any]):
    """A tool or its function as templates get it, which must not be changed.

    Several requests share it, and what was once written of it.
    """

    __slots__ = ("_json",)  # templates reach no attribute that begins so
    _json: str

    def json(self, write: Callable[[object], str]) -> str:
        """Returns it as JSON. write: writes any value, the same in every call."""
        try:
            return self._json
        except AttributeError:
            self._json = written = write(self)
            return written


class PrintedTools(NamedTuple):
    """Tools as templates get them, and the forms of a prompt with them."""

    tools: Tools
    forms: int = 0


class ToolList:
    """The tools of all requests that sent the same bytes.

    sent: the tools as they were sent, which must not be changed.
    """

    def __init__(self, sent: Tools) -> None:
        self.sent = sent
        self._printed: dict[Hashable, PrintedTools] = {}

    def printed(self, rules: Hashable, convert: Callable[[Tools], PrintedTools]) -> PrintedTools:
        """Returns the tools as templates get them, which must not be changed.

        rules: names what `convert` does, of which there is a bounded number.

        Raises:
            RequestError: `convert` does.
        """
        known = self._printed.get(rules)
        if known is None:
            tools, forms = convert(self.sent)
            known = PrintedTools([_printed(one) for one in tools], forms)
            self._printed[rules] = known
        return known


def _printed(tool: dict[str, Any]) -> PrintedTool:
    return PrintedTool({**tool, "function": PrintedTool(tool["function"])})


def read_tools(raw: msgspec.Raw) -> ToolList | None:
    """Returns the tools that a field lists; None if it is null.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    written = bytes(raw)
    if len(written) > MAX_BYTES or not _has_few_values(written):
        return _read(written)
    return _known(written)


@lru_cache(MOST_LISTS)
def _has_few_values(written: bytes) -> bool:
    found = marks(written)
    return found.commas + found.brackets <= MOST_MARKS


def _read(written: bytes) -> ToolList | None:
    sent = _tools.decode(written)
    return None if sent is None else ToolList(sent)


_known = lru_cache(MOST_LISTS)(_read)
