"""Block keys: ours, chained from the namespace and the token ids, so that requests and events meet.

A key is a 64-bit routing hint, secret to this process: a collision costs a bad route, never a
wrong answer, and nobody outside can aim for one. Keys are never shared or stored.
"""

from collections.abc import Iterator

import msgspec
import xxhash

from kvstate.events import Extra, Tokens

BYTES_PER_TOKEN = 4


class KeySpace:
    """Makes the keys of one process.

    secret: at least 8 random bytes.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 8:  # noqa: PLR2004
            raise ValueError("the secret of a key space has at least 8 bytes")
        self._secret = secret

    def root(self, model: str, lora: str | int | None, block_size: int) -> int:
        """The key before the first block of a prompt: one key space per model and block size.

        An adapter that is known by number only never meets one known by name, nor the base model.
        """
        namespace = msgspec.msgpack.encode((self._secret, model, lora, block_size))
        return int(xxhash.xxh3_64_intdigest(namespace))


def child(parent: int, tokens: memoryview | bytes, extra: Extra) -> int:
    """The key of the block with these tokens (uint32, as bytes) behind `parent`."""
    key: int = xxhash.xxh3_64_intdigest(tokens, seed=parent)
    if extra:
        key = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(extra), seed=key)
    return key


def chain(root: int, tokens: Tokens, block_size: int, first: Extra, limit: int) -> Iterator[int]:
    """The keys of the first `limit` full blocks of a prompt, made as they are asked for.

    first: what makes the first block differ besides its tokens (a cache salt).
    """
    step = block_size * BYTES_PER_TOKEN
    view = memoryview(tokens).cast("B")
    key, extra = root, first
    for start in range(0, min(limit * step, len(view) - step + 1), step):
        key = child(key, view[start : start + step], extra)
        extra = ()
        yield key
