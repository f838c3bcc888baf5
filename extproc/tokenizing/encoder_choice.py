"""Chooses how a model's texts are tokenized (the library, and whether to cut), and proves it.

Engines use `tokenizers`, so its ids are right. A faster way is used only if it gives the same ids
on all probes: fastokens, parts instead of the whole, special tokens added around the text.

The probes are texts that normalizers, pre-tokenizers and regular expressions may treat differently:
classes of characters, runs of white space, ends of lines, joined characters, long words, and added
tokens in different surroundings.
"""

import functools
import importlib
import importlib.metadata
import logging
import re
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import tokenizers

from extproc.base.errors import RequestError
from extproc.tokenizing.text_encoder import Encoder, TextEncoder
from extproc.tokenizing.tokenizer_layout import (
    AddedToken,
    Cutter,
    Frame,
    Layout,
    cut_everywhere,
    frame,
    read,
    tokenizes_piecewise,
)
from kvstate.overlap import Tokens


class PlainEncoder:
    """Uses `tokenizers`. Its batches release the interpreter lock; single texts (0.23) do not."""

    # a thousand characters of prose take 0.4 ms, of digits 1.4 ms: under 3 ms inline
    inline_characters = 2_048
    max_characters = 1024 * 1024
    forgotten_characters = 0

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name = f"tokenizers {tokenizers.__version__}"

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each text, as `Encoder.ids`."""
        with _NamedFailures(texts):
            batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [array("I", one.ids) for one in batch]

    def framed_ids(self, text: str) -> Tokens:
        """Returns the ids of a text with what add_special_tokens adds.

        Raises:
            RequestError: as `ids`; or the text is longer than max_characters
                (too_many_new_characters).
        """
        if len(text) > self.max_characters:
            raise RequestError("too_many_new_characters")
        with _NamedFailures([text]):
            (one,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=True)
            return array("I", one.ids)


class FastEncoder:
    """Uses fastokens (0.3), which returns buffers.

    source: the text of a tokenizer.json.

    Raises:
        ImportError: it is not installed.
        RequestError: fastokens does not support this tokenizer (tokenizer_failed).
    """

    # a thousand characters of prose take 5 us, of white space 330 us: under 3 ms inline
    inline_characters = 8_192
    max_characters = 4 * 1024 * 1024
    # remembering takes 4 us, and memory accesses that miss the processor's caches
    forgotten_characters = 512

    def __init__(self, source: str) -> None:
        library = importlib.import_module("fastokens")
        with _NamedFailures([]):
            self._tokenizer = library.Tokenizer.from_json_str(source)
        self.name = f"fastokens {importlib.metadata.version('fastokens')}"

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each text, as `Encoder.ids`."""
        encode = self._tokenizer.encode_batch_flat
        with _NamedFailures(texts):
            # one by one, since its batches start threads, which cost more than they save; the ids
            # are little-endian, as documented: on a big-endian machine the probes would differ
            return [array("I", encode([text], add_special_tokens=False)[0]) for text in texts]


class CheckedEncoder:
    """Uses another encoder, for texts of which its ids are known to be right.

    refused: other texts.
    """

    def __init__(self, encoder: Encoder, refused: "RefusedCut") -> None:
        self._ids, self._refused = encoder.ids, refused
        self.name = encoder.name
        self.inline_characters = encoder.inline_characters
        self.max_characters = encoder.max_characters
        self.forgotten_characters = encoder.forgotten_characters

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each text, as `Encoder.ids`.

        Raises:
            RequestError: one is refused; or as `Encoder.ids`.
        """
        for text in texts:
            self.check(text)
        return self._ids(texts)

    def check(self, text: str) -> None:
        """Raises RequestError if a text has the pattern."""
        if len(text) >= self._refused.shortest and self._refused.pattern.search(text):
            if self._refused.is_random:
                raise RequestError("random_tokenizer")
            raise RequestError("tokenizer_failed")


class RefusedCut(NamedTuple):
    """Texts of which only the engine knows the ids.

    pattern: which they have. shortest: characters of the shortest one. is_random: whether even an
    engine has other ids for them each time.
    """

    pattern: re.Pattern[str]
    shortest: int
    is_random: bool = False


# All texts of a tokenizer with dropout, which joins pieces by chance.
RANDOM = RefusedCut(re.compile(""), 0, is_random=True)


class _NamedFailures:
    """Turns every error of a library into a RequestError, even a panic, which is no Exception.

    The error's text is not shown. It is a class, since a generator would cost more than a
    short text does.
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


# How many added tokens of one kind are tried; models have thousands that differ only in a number.
_TOKENS_OF_A_KIND = 12

_SCRIPTS = (
    "The quick brown fox isn't lazy; it'S THE DOG'S day, WE'LL see. naïve café coöperate",
    "Быстрая лиса перепрыгивает через ленивую собаку. Ёлка, щука и съезд.",
    "Η γρήγορη αλεπού πηδά. Ἀρχὴ ἥμισυ παντός",
    "快速的棕色狐狸跳过了懒狗。天地玄黃，宇宙洪荒！",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナとひらがな、ﾊﾝｶｸ",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다 한글 한글",
    "الثعلب البني السريع يقفز فوق الكلب الكسول ١٢٣ لَا",
    "השועל המהיר קופץ מעל הכלב העצלן שָׁלוֹם",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते पर कूदती है १२३ क्षत्रिय",
    "வேகமான பழுப்பு நரி สุนัขจิ้งจอกสีน้ำตาล ဗမာစာ ភាសាខ្មែរ ლურჯი հայերեն አማርኛ",
    "İstanbul ıssız DİYARBAKIR ẞ ß ŉ ﬁ ﬂ ﬃ Ǆ ǅ ǆ",
    "ᚠᚢᚦ 𐌰𐌱𐌲 𝔘𝔫𝔦 𝟘𝟙 𠀀𠀁 ꙮ Ꮳ Ⴀ ⰀⰁ 𞤀",
)
_MARKS = (
    "e\u0301 é a\u0308\u0323 ạ̈ Z\u0351\u036b\u0343\u036a\u0302\u036b A\u030a Å Å",
    "①②③ ⅷ ½ x² H₂O ﹏ ＡＢＣ１２３ ㎏ ℃ ｶﾞ ㍿",
    "👍 👍🏽 👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 🇩🇪🇫🇷 ☺️ ☺ 1️⃣ 🫨",
    "a\u200bb\u200cc\u200dd\u2060e\ufefff \u00adg \u202eabc\u202c \u2066x\u2069",
    "\x00 \x01\x02 \x07\x08 \x0b\x0c \x1b[31m \x7f \x80\x85\x9f \ufffd \ufffe \U0010ffff \ue000",
    "“quotes” ‘single’ — dash – en … «guillemets» ¿qué? ¡ay! § ¶ † № ™ €£¥₹₿ ±×÷≠≤∞∑√∂",
    "Ġ ▁ ▁▁ Ċ ĉ ## ##ing <0x0A> <unk> [UNK] </w> @@ <|im_start <|end|",
)
_SPACES = (
    "",
    " ",
    "  ",
    "\n",
    "\t",
    "a",
    " a",
    "a ",
    "  a  ",
    "a  b   c    d     e",
    "a\tb\t\tc \t d",
    "a\nb\n\nc\n\n\nd\r\ne\r\n\r\nf\rg",
    "  \n  \n\n   x \n",
    "line   \n   indented\n\t\ttabs  \n",
    "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u1680g\u180eh",
    " \u00a0 \u3000\u3000 x",
    f"{' ' * 130}x{' ' * 3}",
    f"x{chr(10) * 40}y",
    f"{' ' * 7}{chr(10)}{' ' * 9}{chr(9) * 5}z",
)
_CODE = (
    "def f(x: int = 0) -> str:\n    return f'{x!r:>10}'  # ok\n\n\nclass A(B):\n\tpass\n",
    "for(int i=0;i<=n;++i){a[i]^=~b->c.d&&e||!f;} /* c */ // d\n#include <stdio.h>",
    '{"key": [1, 2.50, -3e-7, null, true], "a\\"b": "\\u00e9\\n"}',
    "<div class='x'>&nbsp;<a href=\"https://e.org/p?q=1&r=%20#s\">t</a></div><!-- c -->",
    "SELECT * FROM t WHERE a='b' AND c<>1; $HOME/bin ~/x C:\\dir\\f.txt user@host:~$ ls -la",
    "# Title\n\n- item\n- **bold** _it_ `code`\n\n| a | b |\n|---|---|\n```py\nx\n```\n",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case x__y _z HTTPServer2Go iOS17 o'clock",
    "aGVsbG8gd29ybGQ= 0xDEADbeef 550e8400-e29b-41d4-a716-446655440000 v1.2.3-rc.4+5",
)
_NUMBERS = (
    "0 1 12 123 1234 12345 123456 1234567890 3.14159 1,234,567.89 1e10 007 -5 +5 50% $9.99",
    "1st 2nd 3rd 2026-11-21T08:53:00Z 12:30 1/2 ١٢٣٤٥٦ १२३४५ 一二三 ⅠⅡⅢ x1y22z333 4444a",
    "9" * 300,
)
_LONG = (
    "a" * 700,
    "Ab" * 300,
    "донаудампфшиффартсгезельшафт" * 20,
    "中文字符没有空格" * 60,
    "!?" * 150 + "." * 200 + "=" * 100 + "-" * 99,
    "e\u0301" * 200,
    "👩\u200d👩\u200d👧" * 40,
)

PLAIN: tuple[str, ...] = (*_SCRIPTS, *_MARKS, *_SPACES, *_CODE, *_NUMBERS, *_LONG)

# Texts before and after an added token.
_AROUND = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    " \t\n ",
    "x",
    "X ",
    " x",
    "'s",
    ".",
    "1",
    "中",
    "é",
    "\u0301",
)


def probes(added: Sequence[AddedToken]) -> list[str]:
    """Returns the texts on which encoders are compared, for a tokenizer with these added tokens."""
    tokens = _chosen(added)
    around = [
        "".join(f"{before}{token}{_AROUND[(index + turn) % len(_AROUND)]}" for token in tokens)
        for turn, (index, before) in enumerate(enumerate(_AROUND))
    ]
    alone = [text for token in tokens for text in (token, f"{token}{token} a{token}b")]
    broken = [f"{token[:-1]} {token[1:]} {token[:-1]}{token}" for token in tokens]
    mixed = "".join(
        f"{tokens[index % len(tokens)]}{text}" if tokens else text
        for index, text in enumerate(PLAIN)
    )
    return [*PLAIN, *around, *alone, *broken, mixed]


def _chosen(added: Sequence[AddedToken]) -> list[str]:
    """Returns some tokens of each kind: the first, and others spread over the rest."""
    kinds: dict[tuple[bool, ...], list[str]] = {}
    for token in added:
        kind = (token.lstrip, token.rstrip, token.single_word, token.normalized, token.special)
        kinds.setdefault(kind, []).append(token.content)
    chosen = []
    for contents in kinds.values():
        few = _TOKENS_OF_A_KIND // 2
        step = max(1, len(contents) // few)
        chosen += [*contents[:few], *contents[few::step][:few]]
    return chosen


# Returns the ids of a text, or raises RequestError.
Encode = Callable[[str], Tokens]


def difference(
    ours: Encode, reference: Encode, texts: Sequence[str], has_time: Callable[[], bool]
) -> str | None:
    """Returns how one encoder differs from another on the probes, None if it does not.

    It names a text by its index. A text that both refuse is no difference.
    """
    for index, text in enumerate(texts):
        if not has_time():
            return f"not compared in time: {index} of {len(texts)} probes"
        if _ids_or_none(ours, text) != _ids_or_none(reference, text):
            return f"probe {index} differs"
    return None


def in_parts(encode: Encode, cutter: Cutter) -> Encode:
    """Returns a function that encodes a text in as many parts as a cutter allows."""

    def encode_parts(text: str) -> Tokens:
        edges = (0, *(start for start, _ in cutter.find(text, 0)), len(text))
        parts = [encode(text[start:end]) for start, end in pairwise(edges)]
        for part in parts[1:]:
            parts[0].extend(part)
        return parts[0]

    return encode_parts


def _ids_or_none(encode: Encode, text: str) -> Tokens | None:
    try:
        return encode(text)
    except RequestError:
        return None


log = logging.getLogger("kvsteer.tokens")

NO_FRAME = Frame()

# Time limit of each comparison, in the thread's CPU time; with 130k tokens they took up to 0.15 s.
PROOF_SECONDS = 0.5


class EncoderChoice(NamedTuple):
    """The encoder, cutter and frame with which the texts of one model are tokenized.

    frame: the ids that add_special_tokens adds; None if only `encode_whole` knows them.
    encode_whole: encodes a text with them.
    layout: of the tokenizer.
    encoder: encodes single texts.
    """

    texts: TextEncoder
    frame: Frame | None
    encode_whole: Encode
    layout: Layout
    encoder: Encoder


def choose(
    tokenizer: tokenizers.Tokenizer,
    model: str,
    max_known_bytes: int,
    *,
    refused: RefusedCut | None = None,
    clock: Callable[[], float] = time.thread_time,
    proof_seconds: float = PROOF_SECONDS,
) -> EncoderChoice:
    """Returns the cheapest way to get the same ids as `tokenizers`, and logs which it is.

    model: its name, for the log.
    refused: texts of which the tokenizer does not have the engine's ids, None if there are none.
    clock: of the proofs, in seconds.
    proof_seconds: the most that each of the up to three proofs may take; what is not proved by then
        is not used.

    Raises:
        ValueError: it has too many added tokens, or too long ones.
    """
    source = tokenizer.to_str()
    layout = read(source)
    texts = probes(layout.added_tokens)
    proofs = _EncoderProof(tokenizer, texts, model, clock, proof_seconds)
    plain = PlainEncoder(tokenizer)
    encoder = _fast(source, proofs, model) or plain
    cutter = Cutter(layout.added_tokens) if tokenizes_piecewise(layout) else None
    if cutter is not None and not proofs.hold_for_parts(
        encoder, Cutter(layout.added_tokens, cut_everywhere)
    ):
        cutter = None
    around = frame(layout)
    if around is not None and not proofs.hold_for_frame(encoder, around):
        around = None
    cut_at = len(cutter.contents) if cutter else 0
    log.info("model %s: tokenized by %s, cut at %d special tokens", model, encoder.name, cut_at)
    whole: Encode = plain.framed_ids
    if refused is not None:
        encoder = checked = CheckedEncoder(encoder, refused)
        whole = _checked(checked, plain.framed_ids)
    text_encoder = TextEncoder(encoder, cutter, max_known_bytes)
    return EncoderChoice(text_encoder, around, whole, layout, encoder)


def _checked(checked: CheckedEncoder, encode: Encode) -> Encode:
    def check_and_encode(text: str) -> Tokens:
        checked.check(text)
        return encode(text)

    return check_and_encode


class _EncoderProof:
    """Compares with `tokenizers`, encoding one text at a time, as engines may."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        texts: list[str],
        model: str,
        clock: Callable[[], float],
        proof_seconds: float,
    ) -> None:
        self._texts = texts
        self._model = model
        self._clock = clock
        self._proof_seconds = proof_seconds
        self._bare = functools.cache(_reference(tokenizer, add_special_tokens=False))
        self._framed = functools.cache(_reference(tokenizer, add_special_tokens=True))

    def hold_for_library(self, encoder: Encoder) -> bool:
        return self._holds(encoder.name, _single(encoder), self._bare)

    def hold_for_parts(self, encoder: Encoder, cutter: Cutter) -> bool:
        return self._holds("cut text", in_parts(_single(encoder), cutter), self._bare)

    def hold_for_frame(self, encoder: Encoder, around: Frame) -> bool:
        encode = _single(encoder)

        def framed(text: str) -> Tokens:
            return framed_ids(encode(text), around)

        return self._holds("added special tokens", framed, self._framed)

    def _holds(self, what: str, ours: Encode, reference: Encode) -> bool:
        end = self._clock() + self._proof_seconds
        found = difference(ours, reference, self._texts, lambda: self._clock() < end)
        if found is not None:
            log.warning("model %s: %s: %s; not used", self._model, what, found)
        return found is None


def framed_ids(ids: Tokens, around: Frame) -> Tokens:
    """Returns ids with a frame around them; the same buffer if the frame is empty."""
    if around == NO_FRAME:
        return ids
    framed = array("I", around.before)
    framed.extend(ids)
    framed.extend(around.after)
    return framed


def _fast(source: str, proofs: _EncoderProof, model: str) -> Encoder | None:
    try:
        encoder = FastEncoder(source)
    except ImportError:
        return None
    except RequestError:
        log.info("model %s: fastokens does not support this tokenizer", model)
        return None
    return encoder if proofs.hold_for_library(encoder) else None


def _single(encoder: Encoder) -> Encode:
    return lambda text: encoder.ids([text])[0]


def _reference(tokenizer: tokenizers.Tokenizer, *, add_special_tokens: bool) -> Encode:
    def encode(text: str) -> Tokens:
        # unlike `encode`, it lets other threads run, which may give this one up
        (one,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return array("I", one.ids)

    return encode
