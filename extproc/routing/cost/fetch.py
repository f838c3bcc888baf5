"""A fetch: what a worker can get of a prompt's KV blocks without computing them."""

from typing import Any, NamedTuple

# The name of the term of fetches.
FETCHED = "fetched"


class Peer(NamedTuple):
    """A worker from which others may pull a prompt.

    name, endpoint, port: the worker's, and the port on which it hands over. tokens: of the prompt,
    from its beginning. queued_tokens: those under way to others. tokens_per_second: of transfers.
    work: what is in flight there, in tokens.
    """

    name: str
    endpoint: str
    port: int
    tokens: int
    queued_tokens: float
    tokens_per_second: float
    work: float = 0.0


class Fetch(NamedTuple):
    """What one worker can fetch beyond what it holds.

    value: the tokens that need not be computed then. peer: from which it pulls, None if it loads.
    store: from which it loads, "" if it pulls. credit: by how much its cost is lower. share: of the
    store's tokens, what it is expected to load. held: the tokens that it holds itself.
    """

    tokens: int
    value: float
    peer: Peer | None = None
    store: str = ""
    credit: float = 0.0
    share: float = 1.0
    held: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns what POST /explain shows."""
        shown = {"tokens": self.tokens, "value": round(self.value)}
        if self.peer is not None:
            return {**shown, "from": self.peer.endpoint}
        return {**shown, "from": self.store, "share": round(self.share, 3)}
