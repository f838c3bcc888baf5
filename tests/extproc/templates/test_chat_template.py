import itertools
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.base.errors import RequestError
from extproc.requests.prompt import Chat
from extproc.templates.bounds import MOST_WAITS, Tick
from extproc.templates.chat_template import MAX_WORDS, ChatTemplate
from tests.extproc.template_shapes import GEMMA

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image"}
PLAIN = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
PARTS = (
    "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(Chat(messages or [USER], variables))[0]


def refusal(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    with pytest.raises(RequestError) as caught:
        render(source, messages, **variables)
    return caught.value.reason


def test_render_passes_messages_special_tokens_and_variables() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}"
    assert render(source, extra="!") == "<s>hi!"
    assert render("{{ tools is none and documents is none }}") == "True"


@pytest.mark.parametrize("unit", ["{{x}}", "{#x#}", "{{x+x+x}}"])
def test_template_of_too_many_words_is_refused_at_start(unit: str) -> None:
    with pytest.raises(ValueError, match="words and marks"):
        ChatTemplate(unit * MAX_WORDS, {})


def test_template_that_does_not_compile_is_refused_at_start() -> None:
    for source in ("{% for %}", "{% break %}"):
        with pytest.raises(ValueError, match="not a Jinja template"):
            ChatTemplate(source, {})


def test_render_joins_text_parts_for_a_template_that_expects_text() -> None:
    parts = [text("a"), text(""), {**text("b"), "cache_control": {}}]
    assert render(PLAIN, [{"role": "user", "content": parts}]) == "<a\nb>"
    assert render(PLAIN, [{"role": "assistant", "content": None}]) == "<>"


def test_render_keeps_parts_for_a_template_that_expects_parts() -> None:
    parts = [text("a"), text("")]
    assert render(PARTS, [USER, {"role": "user", "content": parts}]) == "[hi][a][]"
    assert render(PARTS, [{"role": "assistant", "content": None}]) == ""


def test_render_gives_a_tool_result_as_text() -> None:
    tool = {"role": "tool", "content": [text("a"), text("b")]}
    assert render(PARTS, [USER, tool]) == "[hi]<a\nb>"


def test_render_refuses_fields_of_a_part_that_only_newer_releases_show() -> None:
    parts = [{**text("a"), "cache_control": {}}]
    assert refusal(PARTS, [{"role": "user", "content": parts}]) == "unsupported_content"


def test_render_refuses_parts_where_releases_disagree_on_the_text() -> None:
    source = (
        "{% for m in messages %}{% set content = m.content %}{% if content is string %}"
        "{{ content }}{% else %}{% for p in content %}{{ p.text }}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    assert render(source) == "hi"
    parts = [{"role": "user", "content": [text("a"), text("b")]}]
    assert refusal(source, parts) == "unsupported_content_format"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_render_refuses_fields_that_engines_show_differently(field: str) -> None:
    messages = [{"role": "assistant", "content": "a", field: "because"}]
    assert render("{{ messages[0].content }}", messages) == "a"
    for source in ("{{ messages[0].reasoning_content }}", "{{ messages[0].thinking }}"):
        assert refusal(source, messages) == "unsupported_reasoning"
    assert refusal("{{ messages[0]['thinking'] }}", messages) == "unsupported_reasoning"


@pytest.mark.parametrize("name", ["reasoning_effort", "enable_thinking"])
def test_render_accepts_an_effort_only_where_it_is_not_read(name: str) -> None:
    assert ChatTemplate("a", {}).render(Chat([USER], {}, effort="low")) == ("a", 0)
    with pytest.raises(RequestError, match="unsupported_reasoning_effort"):
        ChatTemplate(f"{{{{ {name} }}}}", {}).render(Chat([USER], {}, effort="low"))


def test_render_accepts_a_developer_only_where_the_template_knows_one() -> None:
    messages = [{"role": "developer", "content": "d", "tools": None}]
    assert refusal(PLAIN, messages) == "unsupported_developer_role"
    assert render("{% if messages[0].role == 'developer' %}d{% endif %}", messages) == "d"


def test_render_ends_a_slow_template() -> None:
    clock = itertools.count().__next__
    template = ChatTemplate(PLAIN, {}, tick=lambda budget: Tick(budget, clock, clock))
    with pytest.raises(RequestError, match="template_too_slow"):
        template.render(Chat([USER], {}))[0]


def test_template_that_waits_for_others_is_given_up_late() -> None:
    source = "{% for n in range(12) %}{{ n }}{% endfor %}"
    waits = itertools.count().__next__  # a second at each look
    template = ChatTemplate(source, {}, tick=lambda _: Tick(1.0, waits, lambda: 0.0))
    assert template.render(Chat([USER], {}))[0].startswith("0123")
    with pytest.raises(RequestError, match="template_too_slow"):
        ChatTemplate(
            source.replace("12", "99"), {}, tick=lambda _: Tick(1.0, waits, lambda: 0.0)
        ).render(Chat([USER], {}))


@given(
    st.floats(0.001, 10),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1)), min_size=1, max_size=60),
)
def test_tick_gives_up_a_template_that_works_or_lasts_too_long(
    budget: float, steps: list[tuple[float, float]]
) -> None:
    now = worked = 0.0
    tick = Tick(budget, lambda: now, lambda: worked)
    for passed, share in steps:
        now, worked = now + passed, worked + passed * share
        is_over = worked > budget or now > MOST_WAITS * budget
        try:
            assert bool(tick)
            assert not is_over or worked - budget < 1e-6
        except RequestError:
            assert is_over
            return


def test_strftime_now_is_the_given_date() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {}, now=lambda: datetime(2026, 1, 1))
    assert template.render(Chat([USER], {}))[0] == "2026"


def continued(source: str, content: object) -> str:
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": content}]
    return render(source, messages, continue_final_message=True)


def test_render_continues_a_final_message() -> None:
    assert continued(PLAIN, "so ") == "<hi><so "
    assert continued(PARTS, [text("a"), text("so")]) == "[hi][a][so"
    trims = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert continued(trims, " so ") == "<hi><so"


@pytest.mark.parametrize(
    ("source", "content", "reason"),
    [
        ("nothing", "so", "template_failed"),
        ("{# content #}nothing", "so", "template_failed"),
        (PARTS, None, "template_failed"),
        (PLAIN, "", "unsupported_continuation"),
        (
            "{% for m in messages %}<{{ m.content }}> so{% endfor %}",
            "so",
            "unsupported_continuation",
        ),
        (
            "{% for m in messages %}{{ m.content if 'TAG' in m.content else '' }}{% endfor %}",
            "so",
            "unsupported_continuation",
        ),
    ],
)
def test_render_refuses_a_final_message_whose_end_is_uncertain(
    source: str, content: object, reason: str
) -> None:
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": content}]
    assert refusal(source, messages, continue_final_message=True) == reason


def before_media(
    source: str, messages: list[dict[str, Any]], added: tuple[str, ...] = ("<image>",)
) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render_until_media(Chat(messages, {}), added_tokens=added)[0]


def looked_at(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": [*parts]}]


def test_render_refuses_media() -> None:
    assert refusal(GEMMA, looked_at(IMAGE)) == "unsupported_media"


def test_before_media_returns_the_certain_text() -> None:
    prefix = "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyes?<end_of_turn>\n"
    prefix += "<start_of_turn>user\n"
    assert before_media(GEMMA, looked_at(IMAGE, text("what?"))) == prefix
    assert before_media(GEMMA, looked_at(text("this:"), IMAGE, IMAGE)) == prefix + "this:"


def test_before_media_ends_earlier_for_a_template_that_looks_ahead() -> None:
    ahead = (
        "A{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image>"
        "{% endif %}{% endfor %}{% endfor %}B"
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    assert before_media(ahead, looked_at(text("t"), IMAGE)) == "A"


@given(st.lists(st.text("ab<> \n", max_size=4), max_size=3), st.text("ab<> \n", max_size=4))
def test_before_media_ends_at_the_first_placeholder(words: list[str], end: str) -> None:
    messages = looked_at(*map(text, words), IMAGE, text(end), IMAGE)
    certain = before_media(GEMMA, messages)
    shaped = [
        {**one, "content": [text(one["content"])]} if isinstance(one["content"], str) else one
        for one in messages
    ]
    engines = ImmutableSandboxedEnvironment().from_string(GEMMA)
    whole = engines.render(bos_token="<s>", messages=shaped)
    before, placeholder, _ = whole.partition("<start_of_image>")
    assert placeholder
    assert certain == before


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "an <image>"}, *looked_at(IMAGE)[1:]],
        looked_at(text("an <image>"), IMAGE),
    ],
)
def test_before_media_refuses_a_placeholder_of_the_client(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="unsupported_media"):
        before_media(GEMMA, messages)
    assert before_media(GEMMA, messages, added=("<other>",))


def test_before_media_accepts_a_placeholder_behind_the_media() -> None:
    assert before_media(GEMMA, looked_at(IMAGE, text("an <image>")))
    nothing = {"role": "assistant", "content": None}
    assert before_media(PARTS, [nothing, *looked_at(IMAGE)]) == "[hi][yes?]["


def test_before_media_is_refused_by_a_template_that_expects_text() -> None:
    with pytest.raises(RequestError, match="unsupported_media"):
        before_media(PLAIN, looked_at(IMAGE))


def test_before_media_ends_at_media_of_a_tool() -> None:
    tool = {"role": "tool", "content": [text("a"), IMAGE]}
    assert before_media(PARTS, [USER, tool]) == "[hi][a]["
