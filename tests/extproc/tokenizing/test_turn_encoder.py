from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests.chat_request import roles_of
from extproc.requests.prompt import USUAL_VARIABLES, Chat
from extproc.templates.skeletons import Skeleton
from extproc.tokenizing.tokenizer_layout import AddedToken, Cutter
from extproc.tokenizing.tokens import Tokenizer
from extproc.tokenizing.turn_encoder import TurnEncoder
from kvstate.overlap import Tokens
from simulator.settings import TINY_MODEL

TURN = "<|im_start|>{{ m.role }}\n{{ m.content%s }}<|im_end|>\n"
TEMPLATES = {
    "own": None,
    "stripping": "{% for m in messages %}" + TURN % " | trim" + "{% endfor %}<|im_start|>a",
    "cut in part": "{% for m in messages %}{% if m.role == 'user' %}"
    "[{{ m.content }}]{% else %}" + TURN % "" + "{% endif %}{% endfor %}<|im_start|>",
    "uncut": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
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
def test_ids_of_turns_are_those_of_the_whole_text(
    tokenizers: dict[str, Tokenizer], name: str, messages: list[dict[str, str]]
) -> None:
    for count in range(1, len(messages) + 1):  # a conversation that grows
        part = messages[:count]
        by_turns = Chat(part, USUAL_VARIABLES, roles=roles_of(part))
        for _ in range(2):
            ids = tokenizers[name].encode(by_turns)
            assert ids == tokenizers[name].encode(Chat(part, USUAL_VARIABLES))


def test_only_new_turns_are_tokenized() -> None:
    encoder = Letters()
    known = TurnEncoder(encoder)
    for asked in (["ab", "c"], ["ab", "c", "d"], ["ab", "c", "d"]):
        found = known.find(asked)
        assert known.finish(found) == array("I", list("".join(asked).encode()))
    assert encoder.seen == ["ab", "c", "d"]
    assert known.is_cheap(known.find(["1234"]).new_characters)
    assert not known.is_cheap(known.find(["1234", "5"]).new_characters)


def test_too_many_new_characters_are_refused() -> None:
    known = TurnEncoder(Letters())
    with pytest.raises(RequestError, match="too_many_new_characters"):
        known.finish(known.find(["x" * 21]))


def test_turns_that_were_not_asked_for_lately_are_dropped() -> None:
    encoder = Letters()
    known = TurnEncoder(encoder, 1_500)  # two turns in each generation
    for turn in ("a", "b", "c", "a", "d", "e", "a", "b"):
        known.finish(known.find([turn]))
    assert encoder.seen == ["a", "b", "c", "d", "e", "b"]
    known.finish(known.find(["x" * 19 + "\ue000"]))
    TurnEncoder(encoder, 10).finish(known.find(["too long to be kept"]))


CUTTER = Cutter([AddedToken(0, "<s>", normalized=False), AddedToken(1, "<e>", normalized=False)])


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
    messages = [{"role": "user", "content": " a "}, {"role": "user", "content": " b "}]
    assert (None if found is None else found.of(messages)) == turns
