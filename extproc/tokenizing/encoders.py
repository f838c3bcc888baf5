"""The libraries that tokenize: `tokenizers`, which engines use, and fastokens, which is faster."""

import importlib
import importlib.metadata
from array import array
from collections.abc import Sequence

import tokenizers

from extproc.errors import RequestError
from kvstate.events import Tokens


class PlainEncoder:
    """`tokenizers`. Batches release the interpreter lock, single texts (0.23) do not."""

    # a thousand characters of prose take 0.4 ms, of digits 1.4
    inline_characters = 2_048
    max_characters = 1024 * 1024
    forgotten_characters = 0

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name = f"tokenizers {tokenizers.__version__}"

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """As `Encoder.ids`."""
        with _FailuresNamed(texts):
            batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [array("I", one.ids) for one in batch]

    def framed_ids(self, text: str) -> Tokens:
        """The ids with what add_special_tokens adds.

        Raises:
            RequestError: as `ids`; or the text is longer than max_characters
                (too_many_new_characters).
        """
        if len(text) > self.max_characters:
            raise RequestError("too_many_new_characters")
        with _FailuresNamed([text]):
            (one,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=True)
            return array("I", one.ids)


class FastEncoder:
    """fastokens (0.3), which gives buffers.

    source: the text of a tokenizer.json.

    Raises:
        ImportError: it is not installed.
        RequestError: it cannot be this tokenizer (tokenizer_failed).
    """

    # a thousand characters of prose take 5 us, of white space 330: two milliseconds at most inline
    inline_characters = 8_192
    max_characters = 4 * 1024 * 1024
    # remembering takes 4 us, and memory that then is in no cache
    forgotten_characters = 512

    def __init__(self, source: str) -> None:
        library = importlib.import_module("fastokens")
        with _FailuresNamed([]):
            self._tokenizer = library.Tokenizer.from_json_str(source)
        self.name = f"fastokens {importlib.metadata.version('fastokens')}"

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """As `Encoder.ids`."""
        encode = self._tokenizer.encode_batch_flat
        with _FailuresNamed(texts):
            # one by one: its batches start threads, which cost more than they save
            buffers = [encode([text], add_special_tokens=False)[0] for text in texts]
        # little-endian, as documented; elsewhere the probes differ
        return [array("I", buffer) for buffer in buffers]


class _FailuresNamed:
    """Whatever a library fails with becomes a RequestError: a panic in it is no Exception.

    Nothing of it is shown. Not a generator: that would cost more than to tokenize a short text.
    """

    __slots__ = ("_texts",)

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
            raise RequestError(_reason(self._texts)) from None


def _reason(texts: Sequence[str]) -> str:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return "not_unicode"
    return "tokenizer_failed"
