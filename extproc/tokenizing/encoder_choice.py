"""How a model's texts are tokenized: by which library, cut or whole; proven when it is loaded.

`tokenizers` is what engines use, so its ids are right. Anything quicker is used only where it gives
the same ids on probes: fastokens, parts instead of the whole, added special tokens put around.
"""

import functools
import logging
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

import tokenizers

from extproc.errors import RequestError
from extproc.tokenizing.cuts import Cutter, everywhere
from extproc.tokenizing.encoders import FastEncoder, PlainEncoder
from extproc.tokenizing.probes import probes
from extproc.tokenizing.same_tokens import Encode, difference, in_parts
from extproc.tokenizing.text_encoder import Encoder, TextEncoder
from extproc.tokenizing.tokenizer_layout import AddedToken, Frame, frame, read, tokenizes_piecewise
from kvstate.events import Tokens

log = logging.getLogger("kvsteer.tokens")

NO_FRAME = Frame()

# Each comparison may take so much time of the thread; with 130k tokens they took up to 0.15 s.
PROOF_SECONDS = 0.5


class Choice(NamedTuple):
    """How texts of one model are tokenized.

    frame: what add_special_tokens adds; None where only `whole` knows.
    whole: encodes a text with them.
    added: the tokenizer's added tokens.
    """

    texts: TextEncoder
    frame: Frame | None
    whole: Encode
    added: list[AddedToken]


def choose(
    tokenizer: tokenizers.Tokenizer,
    model: str,
    max_known_bytes: int,
    seconds: Callable[[], float] = time.thread_time,
) -> Choice:
    """Finds the cheapest way to the same ids, and logs which it is.

    model: its name, for the log.
    seconds: the clock of the proofs.
    """
    source = tokenizer.to_str()
    layout = read(source)
    proofs = _Proofs(tokenizer, probes(layout.added_tokens), seconds, model)
    plain = PlainEncoder(tokenizer)
    encoder = _fast(source, proofs, model) or plain
    cutter = Cutter(layout.added_tokens) if tokenizes_piecewise(layout) else None
    if cutter is not None and not proofs.hold_for_parts(
        encoder, Cutter(layout.added_tokens, everywhere)
    ):
        cutter = None
    around = frame(layout)
    if around is not None and not proofs.hold_for_frame(encoder, around):
        around = None
    cut_at = len(cutter.contents) if cutter else 0
    log.info("model %s: tokenized by %s, cut at %d special tokens", model, encoder.name, cut_at)
    texts = TextEncoder(encoder, cutter, max_known_bytes)
    return Choice(texts, around, plain.framed_ids, layout.added_tokens)


class _Proofs:
    """Compares with `tokenizers`, encoding one text at a time, as engines may."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        texts: list[str],
        seconds: Callable[[], float],
        model: str,
    ) -> None:
        self._texts = texts
        self._seconds = seconds
        self._model = model
        self._bare = functools.cache(_reference(tokenizer, add_special_tokens=False))
        self._framed = functools.cache(_reference(tokenizer, add_special_tokens=True))

    def hold_for_library(self, encoder: Encoder) -> bool:
        return self._holds(encoder.name, _one(encoder), self._bare)

    def hold_for_parts(self, encoder: Encoder, cutter: Cutter) -> bool:
        return self._holds("cut text", in_parts(_one(encoder), cutter), self._bare)

    def hold_for_frame(self, encoder: Encoder, around: Frame) -> bool:
        encode = _one(encoder)
        framed: Encode = lambda text: framed_ids(encode(text), around)  # noqa: E731
        return self._holds("added special tokens", framed, self._framed)

    def _holds(self, what: str, ours: Encode, reference: Encode) -> bool:
        end = self._seconds() + PROOF_SECONDS
        found = difference(ours, reference, self._texts, lambda: self._seconds() < end)
        if found is not None:
            log.warning("model %s: %s: %s; not used", self._model, what, found)
        return found is None


def framed_ids(ids: Tokens, around: Frame) -> Tokens:
    """Ids with a frame around them; the same buffer where there is none."""
    if around == NO_FRAME:
        return ids
    framed = array("I", around.before)
    framed.extend(ids)
    framed.extend(around.after)
    return framed


def _fast(source: str, proofs: _Proofs, model: str) -> Encoder | None:
    try:
        encoder = FastEncoder(source)
    except ImportError:
        return None
    except RequestError:
        log.info("model %s: fastokens does not know this kind of tokenizer", model)
        return None
    return encoder if proofs.hold_for_library(encoder) else None


def _one(encoder: Encoder) -> Encode:
    return lambda text: encoder.ids([text])[0]


def _reference(tokenizer: tokenizers.Tokenizer, *, add_special_tokens: bool) -> Encode:
    def encode(text: str) -> Tokens:
        return array("I", tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    return encode
