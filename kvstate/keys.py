"""Block keys of the plain core: chained from the namespace and the token ids.

A key is a 64-bit routing hint, secret to this process: a collision costs a bad route, never a
wrong answer, and nobody outside can aim for one. Keys are never shared or stored. The compiled core
has keys of its own (kvstate/native/index.h).
"""

from collections.abc import Iterator

import msgspec
import xxhash

from kvstate.events import Extra, Tokens

BYTES_PER_TOKEN = 4


def root_key(secret: int, seed: bytes, lora: str | int | None, block_size: int) -> int:
    """The key before the first block of a prompt: one key space per model and block size.

    secret: 64 random bits of this process. seed: stands for the model. An adapter that is known by
    number only never meets one known by name, nor the base model.
    """
    namespace = msgspec.msgpack.encode((secret, seed, lora, block_size))
    return int(xxhash.xxh3_64_intdigest(namespace))


def encoded(extra: Extra) -> bytes | None:
    """What a block carries besides tokens, as cores take it; None where there is nothing."""
    return msgspec.msgpack.encode(extra) if extra else None


def child(parent: int, tokens: memoryview | bytes, extra: bytes | None) -> int:
    """The key of the block with these tokens (uint32, as bytes) behind `parent`.

    extra: what it carries besides tokens.
    """
    key: int = xxhash.xxh3_64_intdigest(tokens, seed=parent)
    return key if extra is None else int(xxhash.xxh3_64_intdigest(extra, seed=key))


def chain(
    root: int, tokens: Tokens | memoryview, block_size: int, first: bytes | None, limit: int
) -> Iterator[int]:
    """The keys of the first `limit` full blocks of a prompt, made as they are asked for.

    first: what the first block carries besides its tokens (a cache salt).
    """
    step = block_size * BYTES_PER_TOKEN
    view = memoryview(tokens).cast("B")
    key, extra = root, first
    for start in range(0, min(limit * step, len(view) - step + 1), step):
        key = child(key, view[start : start + step], extra)
        extra = None
        yield key
