"""How minijinja writes values and runs methods, beyond what is recorded in tests/extproc/rust."""

import pytest
from jinja2.exceptions import SecurityError

from extproc.base.errors import RequestError
from extproc.requests.prompt import Chat
from extproc.templates.bounds import Tick
from extproc.templates.rust_sandbox import text_of
from extproc.templates.rust_template import RustTemplate, of_file


def rendered(source: str, **variables: object) -> str:
    given = {"add_generation_prompt": True, "continue_final_message": False, **variables}
    chat = Chat([{"role": "user", "content": "hi"}], given)
    return RustTemplate(source, {}).render(chat, Tick(10))[0]


def test_what_rust_s_own_tables_decide_is_not_written() -> None:
    assert text_of(["\x01", "é"]) == '["\\u{1}", "é"]'
    for unknown in (["e\u0301"], ["\u200d"]):
        with pytest.raises(RequestError):
            text_of(unknown)
    assert [text_of(one) for one in (float("nan"), float("-inf"))] == ["NaN", "-inf"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ [1] | tojson(indent=true) }}", "[\n 1\n]"),
        ("{{ 'a\nb'.splitlines(true) }}", '["a\\n", "b"]'),
        ("{{ 'aXa'.rfind('a') }}{{ 'ab'.islower() }}{{ '12'.isdigit() }}", "2TrueTrue"),
        ("{{ 'a'.nothing is defined }}{{ [1].nothing is defined }}", "FalseFalse"),
        ("{{ [1, 1].count(1) }}{{ 1 .x is defined }}", "2False"),
        ("{% set ns = namespace(a=1) %}{{ ns['a'] }}{{ ns.a }}", "1"),
    ],
)
def test_methods_mean_what_minijinja_s_do(source: str, text: str) -> None:
    assert rendered(source).startswith(text)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x\x1cy'.split() }}",
        "{{ 'a'.split('') }}",
        "{{ 'é'.title() }}",
        "{{ '²'.isdigit() }}",
        "{{ '{0}'.format(1) }}",
        "{{ ('x' * 900000).replace('x', '{}').format(1) }}",
        "{{ 'a\n' | indent(90000000) }}",
        "{{ 1 | items }}",
        "{{ 'a' | wordcount }}",
        "{{ cycler('a') }}",
        "{{ {'a': namespace()} | tojson }}",
        "{{ namespace() }}",
    ],
)
def test_what_is_not_followed_or_too_large_is_refused(source: str) -> None:
    with pytest.raises((RequestError, SecurityError)):
        rendered(source)


def test_file_of_a_template_is_trimmed_and_its_newlines_are_written_out() -> None:
    assert of_file("\n a\\nb \n") == "a\nb"


def test_template_of_other_syntax_is_none() -> None:
    with pytest.raises(ValueError, match="not a Jinja template"):
        RustTemplate("{% if %}", {})


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for c in m['content'] %}{% endfor %}{% endfor %}", True),
        (("{% set x = messages | list %}{% for m in x %}{% for c in m.content | list %}"
         "{% endfor %}{% endfor %}"), True),
        ("{% for c in content %}{% endfor %}", True),
        ("{% for c in content | list %}{% endfor %}", False),
        (("{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}"
         "{% endfor %}"), False),
        ("{% for m in messages %}{% for a, b in m.content %}{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content[0] }}{% endfor %}", False),
        (("{% for m in messages is defined %}{% for c in m.content %}{% endfor %}"
         "{% endfor %}"), True),
    ],
)  # fmt: skip
def test_template_takes_parts_if_a_loop_goes_over_a_content(source: str, takes: bool) -> None:
    assert RustTemplate(source, {}).takes_parts is takes
