"""Whether two ways to tokenize give the same ids, as far as probes tell."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from extproc.errors import RequestError
from extproc.tokenizing.cuts import Cutter
from kvstate.events import Tokens

# From a text to its ids, or a RequestError.
Encode = Callable[[str], Tokens]


def difference(
    ours: Encode, reference: Encode, texts: Sequence[str], has_time: Callable[[], bool]
) -> str | None:
    """What keeps one from being used for the other; None if nothing.

    It names a text by its index. A text that both refuse is no difference.
    """
    for index, text in enumerate(texts):
        if not has_time():
            return f"not compared in time: {index} of {len(texts)} probes"
        if _ids_or_none(ours, text) != _ids_or_none(reference, text):
            return f"probe {index} differs"
    return None


def in_parts(encode: Encode, cutter: Cutter) -> Encode:
    """Encodes a text in all parts that a cutter allows."""

    def encode_parts(text: str) -> Tokens:
        edges = (0, *(start for start, _ in cutter.find(text, 0)), len(text))
        parts = [encode(text[start:end]) for start, end in pairwise(edges)]
        for part in parts[1:]:
            parts[0].extend(part)
        return parts[0]

    return encode_parts


def _ids_or_none(encode: Encode, text: str) -> Tokens | None:
    try:
        return encode(text)
    except RequestError:
        return None
