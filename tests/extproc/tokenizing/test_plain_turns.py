"""Plain conversations by their bytes: the ids of the whole, though only new turns are read."""

import json
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc._core import TurnTable, turn_texts
from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests.chat_request import roles_of
from extproc.requests.plain_chat import read_plain
from extproc.requests.prompt import USUAL_VARIABLES, Chat
from extproc.templates.skeletons import Skeleton, Skeletons
from extproc.tokenizing.plain_turns import PlainTurns, TurnParts, plain_turns
from extproc.tokenizing.text_encoder import TextEncoder
from extproc.tokenizing.tokenizer_layout import AddedToken, Cutter
from extproc.tokenizing.tokens import Tokenizer
from kvstate.overlap import Tokens
from kvtools.simulator.settings import TINY_MODEL

TURN = "<|im_start|>{{ m.role }}\n{{ m.content%s }}<|im_end|>\n"
TEMPLATES = {
    "own": None,
    "stripping": "{% for m in messages %}" + TURN % " | trim" + "{% endfor %}<|im_start|>a",
    "cut in part": "{% for m in messages %}{% if m.role == 'user' %}"
    "[{{ m.content }}]{% else %}" + TURN % "" + "{% endif %}{% endfor %}<|im_start|>",
    "uncut": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
    "reads contents": "{% for m in messages %}{{ m.content | upper }}{% endfor %}<|im_start|>",
    "last one first": "{{ messages[-1].content }}<|im_end|>{{ messages[0].content }}<|im_end|>",
}


class Letters:
    """Encodes letters as their numbers, and counts those it was given."""

    name = "letters"
    inline_characters, max_characters, forgotten_characters = 4, 20, 0

    def __init__(self) -> None:
        self.seen: list[str] = []

    def ids(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each text."""
        self.seen += texts
        return [array("I", list(text.encode())) for text in texts]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {}
    for number, (name, template) in enumerate(TEMPLATES.items()):
        file = tmp_path_factory.mktemp("templates") / f"{number}.jinja"
        file.write_text(template or "")
        model = Model("m", tokenizer=str(TINY_MODEL), chat_template=template and str(file))
        loaded = Tokenizer.load(model)
        assert loaded is not None
        made[name] = loaded
    return made


pieces = st.sampled_from([*" \nab.<|>é", "<|im_start|>", "<|im_end|>"])
texts = st.lists(pieces, max_size=8).map("".join)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": texts}
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(st.lists(turns, min_size=1, max_size=6))
def test_ids_of_a_conversation_that_grows_are_those_of_its_whole_text(
    tokenizers: dict[str, Tokenizer], name: str, messages: list[dict[str, str]]
) -> None:
    for count in range(1, len(messages) + 1):  # a conversation that grows
        part = messages[:count]
        by_turns = Chat(part, USUAL_VARIABLES, roles=roles_of(part))
        for _ in range(2):
            ids = tokenizers[name].encode(by_turns)
            assert ids == tokenizers[name].encode(Chat(part, USUAL_VARIABLES))


CUTTER = Cutter([AddedToken(0, "<s>", normalized=False), AddedToken(1, "<e>", normalized=False)])


def body_of(messages: list[dict[str, str]], *, ensure_ascii: bool = True) -> bytes:
    ordered = [{"role": one["role"], "content": one["content"]} for one in messages]
    return json.dumps({"messages": ordered}, ensure_ascii=ensure_ascii).encode()


def said(*contents: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": one} for one in contents]


def found_in(known: PlainTurns, body: bytes) -> TurnParts | None:
    chat = read_plain(body)
    assert chat is not None
    return known.find(body, chat)


def ids_in(known: PlainTurns, body: bytes) -> "array[int]":
    found = found_in(known, body)
    assert found is not None
    return known.finish(found)


@pytest.mark.parametrize("name", ["own", "stripping"])
@given(st.lists(turns, min_size=1, max_size=6), st.data(), st.booleans())
def test_ids_of_plain_turns_are_those_of_the_whole_text(
    tokenizers: dict[str, Tokenizer],
    name: str,
    messages: list[dict[str, str]],
    data: st.DataObject,
    ensure_ascii: bool,
) -> None:
    tokenizer = tokenizers[name]
    known = tokenizer.plain_turns
    assert known is not None
    tokenizer.encode(Chat(messages, USUAL_VARIABLES, roles=tuple(one["role"] for one in messages)))
    others = [{**one, "content": data.draw(texts)} for one in messages]
    for part in (messages, others, others):
        whole = tokenizer.encode(Chat(part, USUAL_VARIABLES))
        assert ids_in(known, body_of(part, ensure_ascii=ensure_ascii)) == whole


@pytest.mark.parametrize("name", ["cut in part", "uncut", "last one first"])
def test_template_that_is_not_cut_into_turns_has_no_plain_ones(
    tokenizers: dict[str, Tokenizer],
    name: str,
) -> None:
    known = tokenizers[name].plain_turns
    messages = said("a", "b")
    tokenizers[name].encode(Chat(messages, USUAL_VARIABLES, roles=("user", "user")))
    assert known is not None
    assert [found_in(known, body_of(messages)) for _ in range(2)] == [None, None]


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        (
            "A\x1d\ue0040\ue005\x1d<e>.<s>B\x1d\ue0041\ue005\x1d<e>Z",
            ["A a ", "<e>.<s>B b ", "<e>Z"],
        ),
        ("\ue0040\ue005.<s>\ue0041\ue005<e>", ["a.", "<s>b", "<e>"]),
        ("\x1d\ue0040\ue005\x1d<s>\ue0041\ue005<s>", None),  # one is stripped, one is not
        ("\x1d\ue0040\ue005\x1d.\x1d\ue0041\ue005\x1d<s>", None),  # no cut between
        ("\x1d\ue0041\ue005\x1d<s>\x1d\ue0040\ue005\x1d<s>", None),  # another order
        ("<s>", None),
    ],
)
def test_skeleton_is_cut_between_all_contents_or_not(text: str, turns: list[str] | None) -> None:
    found = Skeleton(text, 2).cut(CUTTER.first)
    if found is None:
        assert turns is None
        return
    contents = [one.strip() if found.strips else one for one in (" a ", " b ")]
    around = zip(found.before, contents, found.behind, strict=True)
    assert [*map("".join, around), found.last] == turns


def written(messages: Any) -> str:
    return "".join([f"<s>{one['role'][0]}{one['content']}" for one in messages]) + "<e>."


def learned(encoder: Letters, *roles: str, max_bytes: int = 10_000) -> PlainTurns:
    """Turns of a template that writes "<s>" and a letter before contents, for up to three turns."""
    skeletons = Skeletons()
    for count in (1, 2, 3):
        messages = [{"role": role, "content": ""} for role in (roles or ("user",) * 3)[:count]]
        shape = tuple(one["role"] for one in messages)
        skeletons.learn(shape, messages, written(messages), written)
    return PlainTurns(encoder, CUTTER, skeletons, max_bytes=max_bytes)


def test_only_new_turns_are_read_and_tokenized() -> None:
    encoder = Letters()
    known = learned(encoder)
    for asked in (("ab", "c"), ("ab", "c", "\n"), ("ab", "c", "\n")):
        whole = written(said(*asked))
        assert ids_in(known, body_of(said(*asked))) == array("I", list(whole.encode()))
    assert encoder.seen == ["<e>.", "<s>uab", "<s>uc", "<e>.", "<s>u\n"]


def test_turns_with_the_same_content_differ_by_what_is_around_it() -> None:
    known = learned(Letters(), "system", "user", "assistant")
    messages = said("a", role="system") + said("a") + said("a", role="assistant")
    for _ in range(2):
        assert ids_in(known, body_of(messages)) == array("I", list(b"<s>sa<s>ua<s>aa<e>."))


def test_cheap_is_what_has_few_new_characters() -> None:
    known, cheap = learned(Letters()), []
    for text in ("", "a"):  # 4 characters are cheap, and so is what is known
        found = found_in(known, body_of(said(text)))
        assert found is not None
        cheap.append(known.is_cheap(found))
        known.finish(found)
    assert cheap == [True, False]
    with pytest.raises(RequestError, match="too_many_new_characters"):
        ids_in(known, body_of(said("x" * 21)))


@pytest.mark.parametrize(
    ("role", "written"),
    [
        ("user", '"\\ud800"'),
        ("user", '"\\q"'),
        ("user", '"\\u"'),
        ("user", '"\xff"'),
        ("system", '"\\u0078-anthropic-billing-header: 1"'),
        ("assistant", '"of roles that were not seen"'),
    ],
)
def test_content_that_takes_more_to_know_is_left_to_the_decoder(role: str, written: str) -> None:
    known = learned(Letters(), "user" if role == "assistant" else role, "user", "user")
    body = f'{{"messages":[{{"role":"{role}","content":{written}}}]}}'.encode("latin-1")
    assert found_in(known, body) is None


def test_turns_that_were_not_asked_for_lately_are_forgotten() -> None:
    encoder = Letters()
    known = learned(encoder, max_bytes=600)  # two turns in each generation
    for turn in ("a", "b", "c", "a", "d", "e", "a", "b", "x" * 16):
        ids_in(known, body_of(said(turn)))
    tokenized = [one.removeprefix("<s>u") for one in encoder.seen[1:]]
    assert tokenized == ["a", "b", "c", "d", "e", "b", "x" * 16]
    tiny = learned(encoder, max_bytes=10)
    assert ids_in(tiny, body_of(said("too long"))) == ids_in(tiny, body_of(said("too long")))


def test_many_turns_are_found_again() -> None:
    encoder = Letters()
    known = learned(encoder, max_bytes=1_000_000)
    for _ in range(2):
        for number in range(500):
            ids_in(known, body_of(said(str(number))))
    assert len(encoder.seen) == 501


def test_skeletons_that_are_refuted_serve_no_more() -> None:
    skeletons = Skeletons()
    skeletons.learn(("user",), said("a"), written(said("a")), written)
    known = PlainTurns(Letters(), CUTTER, skeletons)
    assert ids_in(known, body_of(said("a")))
    skeletons.learn(("user",) * 2, said("a", "b"), "another text", written)
    assert found_in(known, body_of(said("a"))) is None


def test_shapes_are_bounded() -> None:
    def numbered(messages: Any) -> str:
        around = [f"<s>{at} of {len(messages)}" for at in range(len(messages))]
        return (
            "".join([at + one["content"] for at, one in zip(around, messages, strict=True)]) + "<e>"
        )

    skeletons, refused = Skeletons(most_sequences=9), 0
    known = PlainTurns(Letters(), CUTTER, skeletons)
    for count in range(1, 99):
        messages = said(*["a"] * count)
        skeletons.learn(("user",) * count, messages, numbered(messages), numbered)
        refused += found_in(known, body_of(messages)) is None
    assert 5 < refused < 20


@pytest.mark.parametrize(("name", "are_plain"), [("own", True), ("reads contents", False)])
def test_turns_are_plain_only_where_templates_write_contents_only(
    tokenizers: dict[str, Tokenizer], name: str, are_plain: bool
) -> None:
    assert (tokenizers[name].plain_turns is not None) is are_plain


def test_turns_are_plain_only_where_texts_are_cut() -> None:
    assert plain_turns(TextEncoder(Letters(), CUTTER, 1_000), Skeletons(), 0) is not None
    assert plain_turns(TextEncoder(Letters(), None, 1_000), Skeletons(), 0) is None


BODY, SPAN, SHAPE = b'"abc"', array("Q", [1, 4]).tobytes(), array("I", [7]).tobytes()


@pytest.mark.parametrize(
    "given",
    [
        (BODY, SPAN, b""),
        (BODY, SPAN[:8], SHAPE),
        (BODY, array("Q", [0, 4]).tobytes(), SHAPE),
        (BODY, array("Q", [4, 1]).tobytes(), SHAPE),
        (BODY, array("Q", [1, 5]).tobytes(), SHAPE),
    ],
)
def test_table_refuses_spans_outside_of_the_body(given: tuple[bytes, bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="span"):
        TurnTable(1_000, bytes(24)).find(*given)


@pytest.mark.parametrize(
    ("parts", "new", "made"),
    [([BODY], [1], [array("I")]), ([BODY], [0], []), ([], [0], [array("I")]), ([b""], [0], [SPAN])],
)
def test_table_keeps_only_what_it_was_asked_for(parts: Any, new: Any, made: Any) -> None:
    with pytest.raises(ValueError, match=r"wants ids|without quotes"):
        TurnTable(1_000, bytes(24)).keep(parts, new, SHAPE, made)
    with pytest.raises(ValueError, match="a secret of 24 bytes"):
        TurnTable(1_000, b"")


ESCAPES = [
    '\\"',
    "\\\\",
    "\\/",
    "\\b\\f",
    "\\n",
    "\\r\\t",
    "\\u00e9",
    "\\uD83D\\ude00",
    "\\ud800",
    "\\udc00",
    "\\u0000",
]
WRITTEN = st.lists(
    st.sampled_from(["a" * 40, "b", "é", "😀", *ESCAPES, "\\q", "\\u12", "\udcff", "x-anthropic"])
)


@given(st.lists(WRITTEN.map("".join), min_size=1, max_size=4), st.data(), st.text(), st.text())
def test_texts_of_turns_are_those_of_the_decoder(
    contents: list[str], data: st.DataObject, before: str, behind: str
) -> None:
    body, spans = b"", array("Q")
    expected: list[str | None] = []
    for content in contents:
        raw = content.encode("utf-8", "surrogateescape")
        spans.extend((len(body) + 1, len(body) + 1 + len(raw)))
        body += b'"' + raw + b'"'
        try:
            expected.append(before + msgspec.json.decode(b'"' + raw + b'"', type=str) + behind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            expected.append(None)
    new = data.draw(st.lists(st.sampled_from(range(len(contents)))))
    around = (before,) * len(contents), (behind,) * len(contents)
    found = turn_texts(body, spans.tobytes(), new, *around)
    assert found == [expected[at] for at in new]


@pytest.mark.parametrize(
    ("new", "around"), [([1], ("", "")), ([-1], ("",)), ([0], ()), ([0], (7,)), (["a"], ("",))]
)
def test_texts_are_only_those_of_turns(new: Any, around: Any) -> None:
    for spans in (SPAN, array("Q", [4, 1]).tobytes(), array("Q", [1, 9]).tobytes()):
        with pytest.raises((ValueError, IndexError, TypeError)):
            turn_texts(BODY, spans, [*new, 1], around, around)


def test_text_around_turns_that_is_no_unicode_is_left_to_the_encoder() -> None:
    assert turn_texts(BODY, SPAN, [0], ("\ud800",), ("",)) == [None]
    assert turn_texts(BODY, SPAN, [0], ("<",), (">",)) == ["<abc>"]
