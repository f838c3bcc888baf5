import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.requests.dialect import Format
from extproc.templates.chat_template import content_formats

IN_MACRO = "{% macro say(x) %}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}"
LOOP = "{% for m in messages %}"
INNER = "{% for p in m.content %}{% endfor %}{% endfor %}"
ALIASES = "{% set a = messages %}{% set b = a %}{% set a = b %}"


def found(source: str) -> set[bool]:
    return set(content_formats(ImmutableSandboxedEnvironment().parse(source)).values())


@pytest.mark.parametrize(
    "source",
    [
        LOOP + "{% for p in m.content %}{% endfor %}{% endfor %}",
        LOOP + "{% for p in m['content'] %}{% endfor %}{% endfor %}",
        LOOP + "{% for p in m.content | list %}{% endfor %}{% endfor %}",
        LOOP + "{% for p in m.content[1:] %}{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{% for p in m.content %}{% endfor %}{% endfor %}",
        "{% set x = messages[1:] %}{% for m in x %}" + INNER,
        ALIASES + "{% for m in b | reverse %}" + INNER,
    ],
)
def test_loop_over_the_content_of_a_message_takes_parts(source: str) -> None:
    assert found(source) == {True}


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages }}",
        LOOP + "{{ m.content }}{% endfor %}",
        LOOP + "{% for p in m.tool_calls %}{% endfor %}{% endfor %}",
        LOOP + "{% for p in other.content %}{% endfor %}{% endfor %}",
        "{% for p in messages[0].content %}{% endfor %}",
        LOOP + "{% for p in m[0] %}{% endfor %}{% endfor %}",
    ],
)
def test_loop_of_another_kind_takes_text(source: str) -> None:
    assert found(source) == {False}


def test_loop_over_a_bare_content_divides_the_releases() -> None:
    assert found("{% for p in content %}{% endfor %}") == {False, True}


def test_newest_release_follows_contents_into_macros() -> None:
    calls = ("{{ say(m.content) }}", "{{ say(x=m.content) }}")
    for call in calls:
        assert found(f"{IN_MACRO}{LOOP}{call}{{% endfor %}}") == {False, True}
    for call in ("{{ say(m.role) }}", "{{ say(y=m.content) }}", "{{ m.say(m.content) }}"):
        assert found(f"{IN_MACRO}{LOOP}{call}{{% endfor %}}") == {False}
    bare = "{% macro say(y) %}{% for p in content %}{% endfor %}{% endmacro %}{{ say(1) }}"
    assert found(bare) == {False, True}


@pytest.mark.parametrize(
    "source",
    [
        "{% set a, b = messages, 1 %}" + LOOP + "{% for p in m.content %}{% endfor %}{% endfor %}",
        LOOP + "{% for p in m.content %}{% endfor %}{% endfor %}",
    ],
)
def test_names_bound_in_pairs_are_not_followed(source: str) -> None:
    assert found(source) == {True}


@pytest.mark.parametrize(
    "source",
    [
        "{% for a, b in messages %}{% endfor %}" + LOOP + "{% for p in m.content %}{% endfor %}"
        "{% endfor %}",
        LOOP + "{% for a, b in m.content %}{% endfor %}{% endfor %}",
    ],
)
def test_unresolved_template_takes_text(source: str) -> None:
    assert found(source) == {False}


def test_unresolved_name_divides_the_releases() -> None:
    source = "{% for a, b in content %}{% endfor %}" + LOOP
    source += "{% for p in m.content %}{% endfor %}{% endfor %}"
    assert found(source) == {False, True}


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns.turns = messages %}" + LOOP + INNER,
        "{% set ns = namespace(rest=messages) %}{% for m in ns.rest %}" + INNER,
        "{% set ns = namespace(rest=messages[1:]) %}{% set a = ns.rest | list %}"
        "{% for m in a %}" + INNER,
        "{% set a = messages %}{% set ns.x = a %}{% for m in ns.x[1:] %}" + INNER,
    ],
)
def test_newest_release_follows_messages_into_namespaces(source: str) -> None:
    formats = content_formats(ImmutableSandboxedEnvironment().parse(source))
    assert [rule for rule, takes_parts in formats.items() if takes_parts] == [Format.NEWEST]


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(rest=messages) %}{% for m in ns.other %}" + INNER,
        "{% set ns = namespace(rest=messages) %}{% for m in other.rest %}" + INNER,
        "{% set ns = other(rest=messages) %}{% for m in ns.rest %}" + INNER,
        "{% set ns = namespace(rest=other) %}{% for m in ns.rest %}" + INNER,
    ],
)
def test_namespaces_without_messages_are_not_followed(source: str) -> None:
    assert found(source) == {False}
