"""Texts on which two ways to tokenize are compared before one is used for the other.

They are about what normalizers, pre-tokenizers and regular expressions may see differently: classes
of characters, runs of white space, ends of lines, what joins characters, long words, and added
tokens with what can stand around them.
"""
# ruff: noqa: RUF001 - characters that look alike are the point

from collections.abc import Sequence

from extproc.tokenizing.tokenizer_layout import AddedToken

# Added tokens of one kind that are tried; models have thousands that differ in a number.
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

PLAIN = (*_SCRIPTS, *_MARKS, *_SPACES, *_CODE, *_NUMBERS, *_LONG)

# What stands before and behind an added token.
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
    """All texts to compare on, for a tokenizer with these added tokens."""
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
    """Some of each kind: the first, and then spread over the rest."""
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
