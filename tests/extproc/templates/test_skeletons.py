from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.chat_request import roles_of
from extproc.requests.prompt import USUAL_VARIABLES, Chat
from extproc.templates import skeletons
from extproc.templates.chat_template import ChatTemplate
from extproc.templates.skeletons import Skeleton, Skeletons
from tests.extproc.template_shapes import CHATML, SHAPES
from tests.extproc.templates.test_content_flow import DECIDES, WRITES_ONLY

Messages = list[dict[str, Any]]
TEMPLATES = [ChatTemplate(one, {}) for one in (*WRITES_ONLY, *DECIDES[:8], *SHAPES.values())]

texts = st.text(st.sampled_from(" \n\x1d\x1ea.<|>{}\ue004\ue0050é"), max_size=6)
turns = st.sampled_from(["system", "user", "assistant"])
a_turn = st.fixed_dictionaries({"role": turns, "content": texts})
conversations = st.lists(a_turn, min_size=1, max_size=5)


def text_of(template: ChatTemplate, messages: Messages, roles: Any) -> str:
    try:
        return template.render(Chat(messages, USUAL_VARIABLES, roles=roles))[0]
    except RequestError as error:
        return f"refused: {error.reason}"


@given(st.sampled_from(TEMPLATES), conversations, st.data())
def test_skeleton_makes_the_text_that_the_template_makes(
    template: ChatTemplate, messages: Messages, data: st.DataObject
) -> None:
    others = [{**one, "content": data.draw(texts)} for one in messages]
    for each in (messages, others):
        assert text_of(template, each, roles_of(each)) == text_of(template, each, None)


def a_b(messages: skeletons.Messages) -> str:
    return "<".join(["", *[one["content"] for one in messages]]) + ">"


def learned(
    messages: Messages, render: Callable[[skeletons.Messages], str] = a_b, **limits: int
) -> Skeletons:
    known = Skeletons(**limits)
    known.learn(roles_of(messages) or (), messages, a_b(messages), render)
    return known


HI = {"role": "user", "content": " hi "}


def test_skeleton_of_other_contents_is_filled_in() -> None:
    assert learned([HI]).text(("user",), [{"role": "user", "content": "you"}]) == "<you>"
    assert learned([HI]).text(("user", "user"), [HI, HI]) is None


@pytest.mark.parametrize(
    "render",
    [
        lambda messages: a_b(messages) + "!",  # another text than the template's
        lambda messages: a_b(messages)[:-2],  # half a mark
        lambda messages: a_b(messages).replace("\x1d", "", 1),  # white space on one side
        lambda _: "<\x1d\ue0047\ue005\x1d>",  # of no message
    ],
)
def test_skeletons_that_are_not_the_templates_text_end_all_skeletons(
    render: Callable[[skeletons.Messages], str],
) -> None:
    known = learned([HI], render)
    known.learn(("user",), [HI], "< hi >", a_b)
    assert known.text(("user",), [HI]) is None


def test_skeletons_are_bounded() -> None:
    known = learned([HI], most_sequences=1, most_messages=2)
    known.learn(("user",) * 3, [HI] * 3, a_b([HI] * 3), a_b)
    known.learn(("user",) * 2, [HI] * 2, a_b([HI] * 2), a_b)
    found = [known.text(("user",) * count, [HI] * count) is not None for count in (1, 2, 3)]
    assert found == [False, True, False]


def test_skeleton_of_a_text_too_long_is_refused() -> None:
    with pytest.raises(RequestError, match="too_many_characters"):
        learned([HI], max_characters=5).text(("user",), [HI])


def test_skeleton_strips_contents_where_the_template_does() -> None:
    skeleton = Skeleton("<\ue0041\ue005|\x1d\ue0041\ue005\x1d\ue0040\ue005>", 2)
    assert skeleton.fill([" a ", " b "]) == "<b| b a>"


def test_skeleton_without_any_mark_is_the_text() -> None:
    assert Skeleton("all", 3).fill(["a", "b", "c"]) == "all"


def test_template_that_fails_only_for_marks_still_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RequestError("template_too_slow")

    monkeypatch.setattr(Skeletons, "learn", fail)
    assert text_of(ChatTemplate(CHATML, {}), [HI], ("user",)).startswith("<|im_start|>user\n hi ")
