"""Golden requests with the added tokens of one model, in a user's text.

Files beside tokenizer.json decide which added tokens there are, and which white space they take: no
fixed text shows that. Vocabularies hold up to thousands that differ in a number only, so of each
such kind the first is taken, then the next, until there are enough.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest

# Most added tokens of a model that golden requests hold, and most characters of all of them: the
# answer stays below a quarter of what is read of one.
MOST_TOKENS = 128
MOST_CHARACTERS = 4_096

_NUMBERS = re.compile(r"\d+")


def text_with(added: Iterable[str]) -> str:
    """Returns a text with added tokens, "" if there are none.

    Each stands between spaces, and between a word and a line's end, where its flags show.
    """
    return "".join(f"say {token} and{token}\n" for token in _chosen(added))


def _chosen(added: Iterable[str]) -> Iterator[str]:
    kinds: dict[str, list[str]] = {}
    for token in added:
        kinds.setdefault(_NUMBERS.sub("0", token), []).append(token)
    in_turns = (one for turn in zip_longest(*kinds.values()) for one in turn if one is not None)
    left = MOST_CHARACTERS
    for token in islice(in_turns, MOST_TOKENS):
        if len(token) <= left:
            left -= len(token)
            yield token
