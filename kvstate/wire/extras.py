"""What blocks carry besides tokens, as engines write it.

vLLM (0.17 and later) sends `extra_keys`, a list or nil for each block: the adapter's name, then
[image hash, offset] pairs, then, in a prompt's first block, the cache salt. SGLang (0.5.18 and
later) sends the salt of a whole chain as `cache_salt`. TensorRT-LLM sends `mm_keys`, for each block
a list of {"hash", "start_offset"}.
"""

from collections.abc import Mapping

from kvstate.events import Extra
from kvstate.wire.admission import INTEGERS, Skipped

# What the extras of one block may take; engines have names, hashes and salts of some 100 bytes.
MAX_EXTRA_BYTES = 4_096

_SCALARS = str | bytes | int | float | None


def extras_of(
    extra_keys: object, mm_keys: object, lora: str | int | None, blocks: int
) -> list[Extra] | None:
    """The extras of each block; None where only tokens count.

    The adapter's name is left out: the root key holds it already.

    Raises:
        Skipped: bad_extra_keys, bad_mm_keys or huge_extra_keys.
    """
    if extra_keys is None and mm_keys is None:
        return None
    extras = _per_block(extra_keys, blocks, "bad_extra_keys")
    images = _per_block(mm_keys, blocks, "bad_mm_keys")
    made = [_extra(keys, lora) + _images(items) for keys, items in zip(extras, images, strict=True)]
    if any(map(is_huge, made)):
        raise Skipped("huge_extra_keys")
    return made if any(made) else None


def is_huge(extra: Extra) -> bool:
    """Whether a block carries more besides tokens than any engine has."""
    left = MAX_EXTRA_BYTES
    for item in extra:
        for scalar in item if isinstance(item, list) else (item,):
            left -= 8 + (len(scalar) if isinstance(scalar, str | bytes) else 0)
            if left < 0:
                return True
    return False


def with_root(
    extras: list[Extra] | None, first_token: int | None, salt: object, blocks: int
) -> list[Extra] | None:
    """The same, where the chain begins a prompt.

    first_token: of bigrams, whose pages hold the second ones only. salt: SGLang's.

    Raises:
        Skipped: bad_cache_salt.
    """
    if salt is not None and not (isinstance(salt, str) and len(salt) <= MAX_EXTRA_BYTES):
        raise Skipped("bad_cache_salt")
    rest = extras[0] if extras else ()
    root: Extra = () if first_token is None else (first_token,)
    if salt is not None and salt not in rest:
        root = (*root, salt)
    if not root:
        return extras
    return [(*root, *rest), *(extras[1:] if extras else [()] * (blocks - 1))]


def _per_block(raw: object, blocks: int, fault: str) -> list[object]:
    if raw is None:
        return [None] * blocks
    if not isinstance(raw, list) or len(raw) != blocks:
        raise Skipped(fault)
    return raw


def _extra(raw: object, lora: str | int | None) -> Extra:
    items = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if items and lora is not None and items[0] == lora:
        items = items[1:]
    if not all(_is_plain(item) for item in items):
        raise Skipped("bad_extra_keys")
    return tuple(items)


def _is_plain(item: object) -> bool:
    """A scalar, or scalars such as vLLM's [image hash, offset]: no engine nests deeper."""
    scalars = item if isinstance(item, list) else [item]
    return all(
        isinstance(scalar, _SCALARS) and (type(scalar) is not int or scalar in INTEGERS)
        for scalar in scalars
    )


def _images(raw: object) -> Extra:
    """TensorRT-LLM's keys of one block, as vLLM writes its own."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise Skipped("bad_mm_keys")
    return tuple(_image(item) for item in raw)


def _image(raw: object) -> list[object]:
    if not isinstance(raw, Mapping):
        raise Skipped("bad_mm_keys")
    image = [raw.get("hash"), raw.get("start_offset")]
    if image[0] is None or not _is_plain(image):
        raise Skipped("bad_mm_keys")
    return image
