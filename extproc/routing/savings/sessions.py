"""Sessions: which workers a client's session prefers while its prompt's tokens are not known."""

import heapq
from collections.abc import Sequence

import xxhash

# Longer session names are ignored: clients might differ only in their ends.
MAX_SESSION_LETTERS = 256

# A shorter request, or one of unknown length, counts as this many tokens.
LEAST_SESSION_TOKENS = 2_048.0


def session_credit(session: str, workers: Sequence[str], tokens: float) -> dict[str, float]:
    """Returns a session's two workers, and how many tokens each counts as holding.

    A session has the same two workers on every router; when a worker is added or removed, only its
    own sessions change. The second worker counts as holding half as many, and is used if the first
    is too busy. workers: their endpoints. tokens: the request's.
    """
    key, credit = session.encode(errors="surrogatepass"), max(tokens, LEAST_SESSION_TOKENS)
    keyed = ((xxhash.xxh3_64_intdigest(name.encode() + b"\0" + key), name) for name in workers)
    first = heapq.nlargest(2, keyed)
    return {name: credit / (1 + at) for at, (_, name) in enumerate(first)}
