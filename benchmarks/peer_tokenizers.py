"""The libraries that the token benchmark compares with: each encodes a text to ids."""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import tokenizers
from measure import CannotRunError
from tekken import tekken

# Encodes a text; the result is only for `ids_of`.
Encode = Callable[[str], Any]


def engine(directory: Path) -> Encode:
    """Returns `tokenizers`, for one text at a time, as engines call it; ids in its own form."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def fastokens(directory: Path) -> Encode:
    """Returns fastokens in its cheapest form: ids as bytes."""
    library = _imported("fastokens")
    tokenizer = library.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return lambda text: tokenizer.encode_batch_flat([text])[0]


def tiktoken(_: Path) -> Encode:
    """Returns tiktoken with the same ranks."""
    library = _imported("tiktoken")
    vocabulary = tekken()
    shift = len(vocabulary.special)
    encoding = library.Encoding(
        "tekken",
        pat_str=vocabulary.pattern,
        mergeable_ranks={token: rank + shift for token, rank in vocabulary.ranks.items()},
        special_tokens=vocabulary.special,
    )
    return lambda text: encoding.encode(text, allowed_special="all")


PEERS: Mapping[str, Callable[[Path], Encode]] = {
    "tokenizers": engine,
    "tiktoken": tiktoken,
    "fastokens": fastokens,
}


def ids_of(encoded: Any) -> list[int]:
    """Returns the ids in the result of one of them."""
    if isinstance(encoded, bytes):
        return memoryview(encoded).cast("I").tolist()
    return list(encoded.ids if hasattr(encoded, "ids") else encoded)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise CannotRunError(f"pip install {name}") from None


def version(package: str) -> str:
    """Returns a package with its version, or that there is none."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"
