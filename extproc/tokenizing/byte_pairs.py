"""Builds byte-level BPE tokenizers of the `tokenizers` library from ranks, as tiktoken has them.

tiktoken joins the two neighbouring parts whose joined bytes have the lowest rank, the leftmost of
equals, until no two neighbours have any; a piece that has a rank itself is one token. The library
joins by an ordered list of merges, the leftmost of equals, and has the same exception
(`ignore_merges`). So every way to cut a token into two tokens becomes a merge, in the order of the
ranks. Ways to cut the same token have an order among themselves, which matters only if two of them
overlap in a text: then the one that tiktoken would take, the left one, comes first.

Source: tiktoken 0.14 (src/lib.rs) and tokenizers 0.22 to 0.23 (models/bpe).
"""

from collections.abc import Iterator, Mapping
from typing import AnyStr

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

# Most tokens of a vocabulary; the largest known have 262,144.
MAX_TOKENS = 524_288

# Most bytes of a token, which is cut at each place; the longest known have 512 (runs of spaces).
MAX_TOKEN_BYTES = 1_024

# Most bytes of all tokens; known vocabularies have one to two million.
MAX_VOCABULARY_BYTES = 8 * 1024 * 1024

# Most ways to cut tokens into two tokens, and bytes of these; o200k has 446,189 of 3 MB. Without a
# limit, runs of one character within the other limits would take gigabytes.
MAX_MERGES = 1_048_576
MAX_MERGES_BYTES = 32 * 1024 * 1024

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _letters() -> str:
    """Returns the character of each byte in byte-level vocabularies, which GPT-2 introduced."""
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in _PRINTED else next(others)) for byte in range(0x100))


LETTERS = _letters()


def check_ranks(ranks: Mapping[bytes, int]) -> None:
    """Checks that ranks are those of a byte-level vocabulary.

    Raises:
        ValueError: there are too many tokens, or too long ones; a single byte is missing, or two
            tokens have one rank.
    """
    if len(ranks) > MAX_TOKENS:
        raise ValueError(f"more than {MAX_TOKENS} tokens")
    if any(len(token) > MAX_TOKEN_BYTES for token in ranks):
        raise ValueError(f"a token of more than {MAX_TOKEN_BYTES} bytes")
    if sum(map(len, ranks)) > MAX_VOCABULARY_BYTES:
        raise ValueError(f"tokens of more than {MAX_VOCABULARY_BYTES} bytes in all")
    if b"" in ranks or any(bytes((byte,)) not in ranks for byte in range(256)):
        raise ValueError("not every single byte is a token, or an empty text is one")
    if len(set(ranks.values())) != len(ranks):
        raise ValueError("two tokens have the same rank")


def merges(ranks: Mapping[AnyStr, int]) -> Iterator[tuple[AnyStr, AnyStr]]:
    """Yields every way to cut a token into two tokens, in the order in which they are joined.

    Raises:
        ValueError: there are too many.
    """
    count = characters = 0
    for token in sorted(ranks, key=ranks.__getitem__):
        for end in _cuts(token):
            if token[:end] in ranks and token[end:] in ranks:
                count, characters = count + 1, characters + len(token)
                if count > MAX_MERGES or characters > MAX_MERGES_BYTES:
                    raise ValueError("its tokens are made of others in too many ways")
                yield token[:end], token[end:]


def _cuts(token: AnyStr) -> Iterator[int]:
    """Yields where a token can be cut, so that of two that overlap in a text the left one is first.

    Cut at `end` and cut at the other end can overlap if the token begins as it ends there.
    """
    length = len(token)
    for end in range(1, length // 2 + 1):
        other = length - end
        comes_first = token[end:] == token[:other] or token[:end] != token[other:]
        yield end if comes_first else other
        if other != end:
            yield other if comes_first else end


def printed(token: bytes) -> str:
    """Returns a token as byte-level vocabularies write it."""
    return token.decode("latin-1").translate(_TABLE)


_TABLE = str.maketrans(dict(enumerate(LETTERS)))


def byte_level_tokenizer(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], first_id: int = 0
) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the same ids as tiktoken's for the same ranks and pattern.

    pattern: cuts texts into pieces, and matches every character (`split_patterns`). special: the
    ids of the special tokens that are found in texts. first_id: the id of rank 0.

    Raises:
        ValueError: as `check_ranks`; or a special token is one of the vocabulary as well.
    """
    check_ranks(ranks)
    vocabulary = {printed(token): rank + first_id for token, rank in ranks.items()}
    if not vocabulary.keys().isdisjoint(special):
        raise ValueError("a special token is one of the vocabulary as well")
    # no piece has spaces; ids without a token are no BPE vocabulary to fastokens
    vocabulary.update({f" {one}": one for one in range(first_id)})
    vocabulary.update(special)
    pairs = [(printed(left), printed(right)) for left, right in merges(ranks)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer
