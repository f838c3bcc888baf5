"""A real vocabulary of 130,000 tokens, as a model's directory and for tiktoken.

It comes with the package mistral_common: Tekken, byte-level BPE with a regular expression, given by
ranks. Merges are found by splitting every token with the ranks below its own.
"""

import base64
import functools
import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from measure import CannotRunError

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")

TEMPLATE = """\
{% for message in messages %}{% if message['role'] == 'user' %}\
[INST]{{ message['content'] }}[/INST]{% else %}{{ message['content'] }}</s>{% endif %}\
{% endfor %}"""


class Tekken(NamedTuple):
    """ranks: of ordinary tokens; an id is the rank plus the number of special tokens."""

    pattern: str
    ranks: dict[bytes, int]
    special: dict[str, int]


@functools.cache
def tekken() -> Tekken:
    """Reads the vocabulary.

    Raises:
        CannotRunError: the package is not installed, or lacks the file.
    """
    found = importlib.util.find_spec("mistral_common")
    if found is None or found.origin is None:
        raise CannotRunError("no vocabulary: pip install mistral_common")
    files = sorted((Path(found.origin).parent / "data").glob("tekken_*.json"))
    if not files:
        raise CannotRunError("no vocabulary: this mistral_common carries no tekken_*.json")
    content = json.loads(files[-1].read_bytes())
    config = content["config"]
    specials = config["default_num_special_tokens"]
    ordinary = content["vocab"][: config["default_vocab_size"] - specials]
    names = [*SPECIAL, *(f"<SPECIAL_{number}>" for number in range(len(SPECIAL), specials))]
    return Tekken(
        config["pattern"],
        {base64.b64decode(one["token_bytes"]): one["rank"] for one in ordinary},
        {name: number for number, name in enumerate(names)},
    )


def single_bytes() -> Tekken:
    """Returns a vocabulary of bytes, which shows that a benchmark runs where there is no other."""
    special = {name: number for number, name in enumerate(SPECIAL)}
    pattern = r"\p{L}+|\p{N}|\s+|[^\p{L}\p{N}\s]+"
    return Tekken(pattern, {bytes([one]): one for one in range(256)}, special)


def write_model(directory: Path, vocabulary: Tekken) -> None:
    """Writes tokenizer.json and a chat template."""
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer(vocabulary)), "utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def _tokenizer(vocabulary: Tekken) -> dict[str, Any]:
    shift = len(vocabulary.special)
    letters = _letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [[spell(left), spell(right)] for left, right in _merges(vocabulary.ranks)]
    ordinary = {spell(token): rank + shift for token, rank in vocabulary.ranks.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    split = {"type": "Split", "pattern": {"Regex": vocabulary.pattern}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": name, **flags, "special": True}
            for name, number in vocabulary.special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {**split, "behavior": "Isolated", "invert": False},
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": vocabulary.special | ordinary,
            "merges": merges,
        },
    }


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns the two parts of every token that has two, by rank."""
    pairs = []
    for token, rank in ranks.items():
        parts = [token[place : place + 1] for place in range(len(token))]
        while len(parts) > 2:
            joined = [
                (ranks.get(left + right, rank), place)
                for place, (left, right) in enumerate(pairwise(parts))
            ]
            lowest, place = min(joined)
            if lowest >= rank:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            pairs.append((rank, parts))
    return [(left, right) for _, (left, right) in sorted(pairs)]


def _letters() -> dict[int, str]:
    """Returns, by byte, the letter that byte-level BPE writes: itself, or one from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    return letters | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
