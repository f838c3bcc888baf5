"""Reads a file of tiktoken: in each line a token in base64, a space, and its rank.

Source: tiktoken 0.14 (load.py). Unlike tiktoken, nothing but base64 is taken for base64.
"""

import binascii

from extproc.tokenizing.byte_pairs import MAX_TOKENS


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Returns the rank of each token.

    Raises:
        ValueError: a line has another form, a token has two lines, or there are too many.
    """
    if content.count(b"\n") + content.count(b"\r") > 2 * MAX_TOKENS:
        raise ValueError(f"more than {MAX_TOKENS} tokens")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            written, rank = line.split(b" ")
            token = binascii.a2b_base64(written, strict_mode=True)
            if not rank.isdigit() or len(rank) > 9 or token in ranks:
                raise ValueError
        except ValueError:  # binascii.Error is one
            raise ValueError(f"line {number} is no token with its rank") from None
        ranks[token] = int(rank)
    return ranks
