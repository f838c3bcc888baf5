"""Block keys in plain Python, chained from the namespace and the ids of tokens.

A key is a 64-bit routing hint. The core computes its keys differently (kvstate/native/index.h).
"""

from collections.abc import Iterator

import msgspec
import xxhash

from kvstate.index.core import BYTES_PER_TOKEN
from kvstate.overlap import Tokens


def root_key(secret: int, seed: bytes, lora: str | int | None, block_size: int) -> int:
    """Returns the key before the first block of a prompt: a key space per model and block size.

    secret: 64 random bits of this process. seed: identifies the model. An adapter known only by
    number has different keys from one known by name, and from the base model.
    """
    namespace = msgspec.msgpack.encode((secret, seed, lora, block_size))
    return int(xxhash.xxh3_64_intdigest(namespace))


def child(parent: int, tokens: memoryview | bytes, extra: bytes | None) -> int:
    """Returns the key of the block with these tokens (uint32, as bytes) that follows `parent`.

    extra: its encoded extra keys (salt, image hashes).
    """
    key: int = xxhash.xxh3_64_intdigest(tokens, seed=parent)
    return key if extra is None else int(xxhash.xxh3_64_intdigest(extra, seed=key))


def chain(
    root: int, tokens: Tokens | memoryview, block_size: int, first: bytes | None, limit: int
) -> Iterator[int]:
    """Yields the keys of the first `limit` full blocks of a prompt, computed lazily.

    first: the extra keys of the first block (a cache salt).
    """
    step = block_size * BYTES_PER_TOKEN
    view = memoryview(tokens).cast("B")
    key, extra = root, first
    for start in range(0, min(limit * step, len(view) - step + 1), step):
        key = child(key, view[start : start + step], extra)
        extra = None
        yield key
