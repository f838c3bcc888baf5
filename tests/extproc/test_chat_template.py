from datetime import datetime
from typing import Any

import pytest

from extproc.chat_template import ChatTemplate
from extproc.errors import RequestError

USER = {"role": "user", "content": "hi"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages or [USER], variables)


def test_messages_special_tokens_and_variables_are_seen() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}"
    assert render(source, extra="!") == "<s>hi!"


def test_blocks_leave_no_blank_lines() -> None:
    assert (
        render(
            "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}"
        )
        == "user\n"
    )


def test_text_parts_are_joined_for_a_template_that_expects_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}",
        "{% for p in messages[0]['content'] %}[{{ p.text }}]{% endfor %}",
        "{% set content = messages[0].content %}{% for p in content %}[{{ p.text }}]{% endfor %}",
    ],
)
def test_parts_stay_parts_for_a_template_that_takes_them_apart(loop: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(loop, [{"role": "user", "content": parts}]) == "[a][b]"


def test_text_is_one_part_for_a_template_that_takes_parts_but_not_what_a_tool_said() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    tool = {"role": "tool", "content": [{"text": "a"}, {"text": "b"}]}
    assert render(source, [USER, tool]) == "[hi]a\nb"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_what_engines_show_to_templates_differently_is_not_claimed(field: str) -> None:
    messages = [{"role": "assistant", "content": "a", field: "because"}]
    assert render("{{ messages[0].content }}", messages) == "a"
    with pytest.raises(RequestError, match="unsupported_reasoning"):
        render("{{ messages[0].reasoning_content }}", messages)
    for source in ("{{ reasoning_effort }}", "{{ enable_thinking }}"):
        with pytest.raises(RequestError, match="unsupported_reasoning_effort"):
            ChatTemplate(source, {}).render([USER], {}, has_reasoning_effort=True)


def test_json_is_written_as_transformers_writes_it() -> None:
    assert render("{{ tools | tojson }}", tools=[{"a": "é<"}]) == '[{"a": "é<"}]'
    assert render("{{ tools | tojson(indent=2) }}", tools=[1]) == "[\n  1\n]"


def test_generation_blocks_are_their_contents() -> None:
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_loops_may_be_left() -> None:
    assert (
        render("{% for n in range(9) %}{{ n }}{% if n == 1 %}{% break %}{% endif %}{% endfor %}")
        == "01"
    )


def test_templates_may_ask_for_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)  # noqa: DTZ005


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_gives_a_reason(source: str) -> None:
    with pytest.raises(RequestError, match="template_failed"):
        render(source)


def test_a_template_that_does_not_compile_is_told_at_start() -> None:
    with pytest.raises(ValueError, match="not a Jinja template"):
        ChatTemplate("{% for %}", {})


def test_a_final_message_can_be_continued() -> None:
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "so "}]
    assert render(source, messages, continue_final_message=True) == "<hi><so"


@pytest.mark.parametrize("content", [None, "", "gone"])
def test_a_final_message_that_is_not_in_the_text_cannot_be_continued(content: str | None) -> None:
    with pytest.raises(RequestError, match="template_failed"):
        render("nothing", [{"role": "assistant", "content": content}], continue_final_message=True)
