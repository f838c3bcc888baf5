from datetime import datetime

import pytest

from extproc.templates.chat_template import Sandbox
from extproc.templates.content_flow import only_writes_contents
from tests.extproc.template_shapes import CHATML


def is_proved(source: str) -> bool:
    return only_writes_contents(Sandbox(datetime.now).parse(source))


def of_each(text: str) -> str:
    return "{% for m in messages %}" + text + "{% endfor %}"


WRITES_ONLY = [
    CHATML,
    "{{ bos_token }}" + of_each("{{ m.role + ': ' + m['content'] | trim + eos_token }}"),
    of_each("{% set content = m.content | trim %}{% if loop.first %}{{ content }}{% endif %}"),
    (
        "{% if messages[0].role == 'system' %}{% set opening = messages[0].content %}"
        "{% set turns = messages[1:] %}{% else %}{% set opening, turns = '', messages %}{% endif %}"
        "{{ opening }}{% for m in turns if m.role != 'system' %}{{ m.content }}{% endfor %}"
    ),
    of_each("{% if m.tool_calls is defined or m.get('tool_calls') %}x{% endif %}{{ m.content }}"),
    of_each("{% if m.content is string %}{{ m.content.strip() }}{% endif %}"),
    of_each("{% if 'name' in m and m is mapping %}{{ m.name }}{% endif %}{{ m.get('content') }}"),
    of_each("{{ m.content if loop.index0 % 2 == 0 else 'x' ~ m.content }}"),
    "{% macro head(role) %}<{{ role }}>{% endmacro %}" + of_each("{{ head(m.role) ~ m.content }}"),
    "{% set ns = namespace(n=0) %}" + of_each("{% set ns.n = ns.n + 1 %}{{ m.content }}"),
    "{{ messages | length }}{{ messages[-1].content }}{{ messages[0] | count }}",
    of_each("{% generation %}{{ m.content }}{% endgeneration %}{% continue %}"),
    of_each("{% set r %}{{ m.role }}{% endset %}{{ r }}{{ m.role if true }}"),
    "{% macro f(x=1) %}{{ x is divisibleby(2) }}{% endmacro %}{{ f() }}{{ none.get('x') }}",
    of_each("{{ tools[m.role] }}{{ m.content }}"),
    "{{ [1, {'a': 2}][0] }}{{ tools | tojson(indent=2) }}{{ range(2) | list }}",
]
DECIDES = [
    of_each("{% if m.content %}x{% endif %}"),
    of_each("{{ m.content | length }}"),
    of_each("{{ m.content[0] }}{{ m.content.upper() }}"),
    of_each("{{ (m.role + m.content) | trim }}"),
    of_each("{{ m.content | trim('x') }}"),
    of_each("{% if 'x' in m.content %}x{% endif %}"),
    of_each("{% if m.content == 'x' %}x{% endif %}"),
    of_each("{% if m.content is lower %}x{% endif %}"),
    of_each("{{ m }}"),
    of_each("{{ m | tojson }}{{ messages }}"),
    of_each("{{ m.content or 'x' }}{{ not m.content }}"),
    of_each("{% for key in m %}{{ m[key] }}{% endfor %}"),
    of_each("{{ m[m.role] }}"),
    of_each("{{ m.items() }}{{ m.values }}"),
    of_each("{{ m.get(m.role) }}"),
    of_each("{{ m.get('content', m.content) }}"),
    of_each("{% set ns.last = m.content %}"),
    of_each("{% set a, b = m.content %}"),
    of_each("{% set x = m %}{% set x = messages %}"),
    of_each("{% set x = m.content %}{% set x = m %}"),
    of_each("{{ loop.previtem.content }}"),
    "{% for m in messages %}{% set l = loop %}{{ l.previtem.content }}{% endfor %}",
    of_each("{{ loop['nextitem'].content }}"),
    "{% for a, b in messages %}{{ a }}{% endfor %}",
    "{% for c in messages[0].content %}{{ c }}{% endfor %}",
    "{% macro show(x) %}{{ x }}{% endmacro %}" + of_each("{{ show(m.content) }}"),
    of_each("{% set x %}{{ m.content }}{% endset %}{{ x }}"),
    of_each("{% set x | upper %}{{ m.role }}{% endset %}"),
    of_each("{{ m ~ m.content }}"),
    of_each("{{ m.content if m.content else 'x' }}"),
    of_each("{{ (m if loop.first else m.content) }}"),
    of_each("{% filter upper %}{{ m.content }}{% endfilter %}"),
    of_each("{% with x = m.content %}{{ x }}{% endwith %}"),
    of_each("{{ raise_exception(m.content) }}"),
    of_each("{{ messages[m.content] }}{{ tools[m.content] }}"),
    of_each("{{ m.content % 1 }}"),
    "{{ strftime_now('%d') }}{{ [1, 2] | random }}",
    "{{ [1, 2] | random }}",
    "{{ messages | reverse | first }}",
    "{{ messages.pop() }}",
    "{{ messages[:messages[0].content] }}",
    "{{ " + "1 + " * 3_000 + "1 }}",
]


@pytest.mark.parametrize("source", WRITES_ONLY)
def test_template_that_only_writes_contents_is_proved(source: str) -> None:
    assert is_proved(source)


@pytest.mark.parametrize("source", DECIDES)
def test_template_that_looks_into_contents_is_not_proved(source: str) -> None:
    assert not is_proved(source)
