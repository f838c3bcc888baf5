"""A template renders a conversation as the engine's release does, and says which forms it met."""

from typing import Any

import msgspec
import pytest

from extproc.base.engine import VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.requests.dialect import NEWEST, Dialect, Effort, dialect_of
from extproc.requests.prompt import (
    BILLING,
    DEVELOPER,
    DISABLED,
    EFFORT,
    INLINE_SYSTEM,
    PARTS,
    REASONING,
    Chat,
)
from extproc.templates.chat_template import ChatTemplate

SHOWN = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('late') }}{% endif %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)
LINE = "x-anthropic-billing-header: cch=1"
SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
LATER = {"role": "system", "content": "t"}


def dialect(minor: int) -> Dialect:
    found = dialect_of(Engine(VLLM, Release(0, minor)))
    assert found is not None
    return found


def rendered(
    source: str, *messages: dict[str, Any], rules: Dialect | None = NEWEST, **fields: Any
) -> tuple[str, int]:
    chat = Chat([*messages], fields.pop("variables", {}), dialect=rules, **fields)
    return ChatTemplate(source, {}).render(chat)


@pytest.mark.parametrize(
    ("source", "minor", "text"),
    [
        (SHOWN, 32, "s:s;u:u;s:t;"),
        (FIRST_ONLY, 32, "s:st;u:u;"),
        ("{% generation %}{% endgeneration %}" + SHOWN, 32, "s:st;u:u;"),
        ("{{ strftime_now('') }}" + SHOWN, 32, "s:st;u:u;"),
        (SHOWN, 30, "s:st;u:u;"),
    ],
)
def test_later_system_turn_stays_only_where_the_template_takes_it(
    source: str, minor: int, text: str
) -> None:
    found = rendered(source, SYSTEM, USER, LATER, rules=dialect(minor), forms=INLINE_SYSTEM)
    assert found == (text, INLINE_SYSTEM)


def test_later_system_turn_is_refused_by_old_releases() -> None:
    with pytest.raises(RequestError, match="bad_request"):
        rendered(SHOWN, SYSTEM, USER, LATER, rules=dialect(19), forms=INLINE_SYSTEM)


def test_billing_line_is_dropped_by_the_newest_release() -> None:
    system = {"role": "system", "content": f"{LINE}\ns"}
    assert rendered(SHOWN, system, forms=BILLING) == ("s:s;", BILLING)
    assert rendered(SHOWN, system, rules=dialect(31), forms=BILLING)[0] == f"s:{LINE}\ns;"


def test_reasoning_is_shown_as_the_release_reads_it() -> None:
    turn = {"role": "assistant", "content": "a", "reasoning_content": "why"}
    source = "{{ messages[0].reasoning or '-' }}"
    assert rendered(source, turn) == ("why", REASONING)
    assert rendered(source, turn, rules=dialect(19)) == ("-", REASONING)


@pytest.mark.parametrize(
    ("effort", "rule", "text"),
    [
        ("high", Effort.SWITCHES, "high True"),
        ("none", Effort.SWITCHES, "none False"),
        ("high", Effort.PASSED, "high "),
        ("high", Effort.IGNORED, " "),
        ("high", None, " "),
        (DISABLED, Effort.SWITCHES, "none False"),
    ],
)
def test_effort_sets_what_the_release_sets(effort: str, rule: Effort | None, text: str) -> None:
    source = "{{ reasoning_effort }} {{ enable_thinking }}"
    assert rendered(source, USER, effort=effort, effort_rule=rule) == (text, EFFORT)


RAISES = (
    "{% for p in messages %}{% for c in p.content %}{{ c.text }}{% endfor %}{% endfor %}"
    "{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}"
    "{{ reasoning_effort }}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% if enable_thinking %}{% endif %}{{ messages[0].content }}",
        RAISES,
    ],
)
def test_thinking_is_made_low_where_none_has_no_effect(source: str) -> None:
    assert ChatTemplate(source, {}).off_effort == "low"


def test_request_that_sets_thinking_itself_keeps_it() -> None:
    variables = {"enable_thinking": True}
    chat = Chat([USER], variables, effort="none", effort_rule=Effort.SWITCHES, dialect=NEWEST)
    assert ChatTemplate("{{ enable_thinking }}", {}).render(chat) == ("True", EFFORT)


def test_developer_becomes_a_system_turn_from_024_on() -> None:
    developer = {"role": "developer", "content": "d", "tools": None}
    assert rendered(SHOWN, SYSTEM, USER, developer) == ("s:s\n\nd;u:u;", DEVELOPER)
    with pytest.raises(RequestError, match="unsupported_developer_role"):
        rendered(SHOWN, developer, rules=dialect(19))


PARTED = (
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}"
    "{{ '!' if p.cache_control is defined }}{% endfor %}{% endfor %}"
)


def test_unknown_fields_of_parts_are_a_form_only_where_a_template_reads_them() -> None:
    part = {"type": "text", "text": "a", "cache_control": {}}
    user = {"role": "user", "content": [part]}
    assert rendered(PARTED, user) == ("a!", PARTS)
    assert rendered(PARTED, user, rules=dialect(24)) == ("a", PARTS)
    assert rendered(PARTED.replace("cache_control", "other"), user) == ("a", 0)


def test_format_is_the_one_that_the_release_detects() -> None:
    source = (
        "{% macro say(x) %}{% if x is string %}{{ x }}{% else %}{% for p in x %}[{{ p.text }}]"
        "{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ say(m.content) }}"
        "{% endfor %}"
    )
    assert rendered(source, USER) == ("[u]", PARTS)
    assert rendered(source, USER, rules=dialect(28)) == ("u", PARTS)
    chat = Chat([USER, {"role": "user", "content": [{"type": "image"}]}], {}, has_media=True)
    template = ChatTemplate(source, {})
    for rules in (dialect(28), None):
        with pytest.raises(RequestError, match="unsupported_media"):
            template.render_until_media(
                msgspec.structs.replace(chat, dialect=rules), added_tokens=()
            )
    newest = msgspec.structs.replace(chat, dialect=NEWEST)
    assert template.render_until_media(newest, added_tokens=()) == ("[u][", PARTS)
