"""Jinja's filters, tests and globals, and transformers' additions, give what the library's give."""

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from extproc.base.errors import RequestError
from extproc.templates.bounds import Tick
from extproc.templates.chat_template import ChatTemplate, Sandbox, rendered

FILTERS = {
    "abs": ["{{ -3|abs }}"],
    "attr": ["{{ 1|attr('missing') is defined }}{{ {}|attr('items') is defined }}"],
    "batch": [
        "{% for row in items|batch(3) %}{{ row }};{% endfor %}",
        "{% for row in items|batch(3, '-') %}{{ row|join }};{% endfor %}",
        "{{ items|batch(99999999)|list }}",
        "{{ []|batch(2, 'x')|list }}",
    ],
    "capitalize": ["{{ 'aB'|capitalize }}"],
    "center": ["[{{ 'ab'|center }}]", "[{{ 'ab'|center(7) }}]", "[{{ 12|center(width=5) }}]"],
    "count": ["{{ items|count }}"],
    "d": ["{{ nothing|d('x') }}"],
    "default": ["{{ ''|default('x', true) }}"],
    "dictsort": ["{{ {'b': 1, 'a': 2}|dictsort }}"],
    "e": ["{{ '<&\"' ~ ('<'|e) }}"],
    "escape": ["{{ '<'|escape }}{{ (('<'|escape) + '>').replace('&', '<') }}"],
    "filesizeformat": ["{{ 13000|filesizeformat }} {{ '1e7'|filesizeformat(true) }}"],
    "first": ["{{ items|first }}"],
    "float": ["{{ '1.5'|float }}"],
    "forceescape": ["{{ ('<'|e)|forceescape }}"],
    "format": ["{{ '%s-%d'|format('a', 3) }}"],
    "groupby": [
        "{% for key, some in people|groupby('age') %}{{ key }}:{{ some|length }}{% endfor %}",
        "{% for one in people|groupby('city', default='?') %}{{ one.grouper }};{% endfor %}",
        "{{ people|groupby('n', case_sensitive=true)|length }}{{ people|groupby('age') }}",
    ],
    "indent": ["{{ 'a\\nb'|indent(2) }}"],
    "int": ["{{ '7'|int }}"],
    "items": ["{{ {'a': 1}|items|list }}"],
    "join": ["{{ items|join(',') }}"],
    "last": ["{{ items|last }}"],
    "length": ["{{ 'abc'|length }}"],
    "list": ["{{ 'ab'|list }}"],
    "lower": ["{{ 'AB'|lower }}"],
    "map": ["{{ people|map(attribute='n')|list }}"],
    "max": ["{{ items|max }}"],
    "min": ["{{ items|min }}"],
    "pprint": ["{{ people|pprint }}", "{{ ('word ' * 40)|pprint }}", "{{ {'b': 1}|pprint }}"],
    "reject": ["{{ items|reject('odd')|list }}"],
    "rejectattr": ["{{ people|rejectattr('age', 'gt', 2)|list }}"],
    "replace": ["{{ 'aa'|replace('a', 'b', 1) }}"],
    "reverse": ["{{ 'abc'|reverse }}"],
    "round": ["{{ 2.567|round(1) }}"],
    "safe": ["{{ '<'|safe }}"],
    "select": ["{{ items|select('odd')|list }}"],
    "selectattr": ["{{ people|selectattr('age')|list }}"],
    "slice": [
        "{% for column in items|slice(3) %}{{ column }};{% endfor %}",
        "{{ items|slice(3, '-')|list }}",
    ],
    "sort": ["{{ [3, 1]|sort(reverse=true) }}"],
    "string": ["{{ 5|string }}"],
    "striptags": ["{{ '<p>a <!-- b --> c</p>'|striptags }}"],
    "sum": ["{{ items|sum }}"],
    "title": ["{{ 'hello world'|title }}"],
    "tojson": ["{{ {'a': 'ä'}|tojson }}"],
    "trim": ["[{{ ' a '|trim }}]"],
    "truncate": [
        "{{ ('word ' * 99)|truncate }}",
        "{{ 'foo bar baz qux'|truncate(9, true, leeway=0) }}{{ 'foo bar'|truncate(5, end='!') }}",
    ],
    "unique": ["{{ [1, 1, 2]|unique|list }}"],
    "upper": ["{{ 'a'|upper }}"],
    "urlencode": ["{{ 'a b/ä'|urlencode }}{{ {'a': 'b c', 'd': 1}|urlencode }}"],
    "urlize": ["{{ 'see https://example.org/x, a@example.org'|urlize(12, target='_blank') }}"],
    "wordcount": ["{{ 'a b'|wordcount }}"],
    "wordwrap": ["{{ 'a long line'|wordwrap(7) }}{{ 'abcdef'|wordwrap(2, wrapstring='|') }}"],
    "xmlattr": ["<a{{ {'class': 'x<y', 'id': none}|xmlattr }}>{{ {'a': 1}|xmlattr(false) }}"],
}  # fmt: skip

TESTS = {
    "!=": "1 is ne 2", "<": "1 is lt 2", "<=": "1 is le 1", "==": "1 is eq 1", ">": "2 is gt 1",
    ">=": "2 is ge 2", "boolean": "true is boolean", "callable": "range is callable",
    "defined": "items is defined", "divisibleby": "9 is divisibleby 3", "eq": "1 is eq(1)",
    "equalto": "1 is equalto 2", "escaped": "('a'|e) is escaped", "even": "2 is even",
    "false": "false is false", "filter": "'pprint' is filter", "float": "1.0 is float",
    "ge": "1 is ge 2", "greaterthan": "1 is greaterthan 2", "gt": "2 is gt 1", "in": "1 is in [1]",
    "integer": "1 is integer", "iterable": "items is iterable", "le": "1 is le 0",
    "lessthan": "1 is lessthan 2", "lower": "'a' is lower", "lt": "1 is lt 0",
    "mapping": "{} is mapping", "ne": "1 is ne 1", "none": "none is none", "number": "1 is number",
    "odd": "1 is odd", "sameas": "none is sameas none", "sequence": "[] is sequence",
    "string": "'' is string", "test": "'odd' is test", "true": "true is true",
    "undefined": "nothing is undefined", "upper": "'A' is upper",
}  # fmt: skip

GLOBALS = {
    "cycler": "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}",
    "dict": "{{ dict(a=1) }}",
    "joiner": "{% set j = joiner('|') %}{{ j() }}a{{ j() }}b",
    "lipsum": "{{ lipsum is defined }}{{ lipsum is callable }}",
    "namespace": "{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}",
    "range": "{{ range(3)|list }}",
}

METHODS = [
    "{{ 'ä'.encode() }}", "{{ 'ä'.encode('utf-8').decode() }}", "{{ 'a'.encode('ascii') }}",
    "{{ 'abc'.translate({97: 'x', 98: none}) }}", "{{ ('<'|e).join(['a', '>']) }}",
    "{{ ('<b>'|e).striptags() }}", "{{ '{}-{a}'.format(1, a=2) }}",
    "{% for x in items %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in items %}{% if x == 3 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
]  # fmt: skip

VARIABLES: dict[str, Any] = {
    "items": [1, 2, 3, 4, 5, 6, 7],
    "people": [
        {"n": "b", "age": 3, "city": "x"},
        {"n": "B", "age": 2},
        {"n": "a", "age": 3, "city": "y"},
    ],
}


def library() -> jinja2.Environment:
    """The environment that transformers makes, with its tojson."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return made


def ours(source: str) -> str:
    environment = Sandbox(datetime.now)
    return rendered(environment.compiled(environment.parse(source)), VARIABLES, Tick(5.0))


SOURCES = [
    *(source for some in FILTERS.values() for source in some),
    *(f"{{{{ {one} }}}}" for one in TESTS.values()),
    *GLOBALS.values(),
    *METHODS,
]


def test_every_filter_test_and_global_of_the_library_is_tried() -> None:
    whole = jinja2.Environment()  # noqa: S701 - nothing is rendered
    assert {*FILTERS, "random"} == {*whole.filters}
    assert {*TESTS} == {*whole.tests}
    assert {*GLOBALS} == {*whole.globals}


@pytest.mark.parametrize("source", SOURCES)
def test_text_is_that_of_the_library(source: str) -> None:
    assert ours(source) == library().from_string(source).render(VARIABLES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ items|random }}",
        "{{ lipsum() }}",
        "{{ {}.fromkeys([1]) }}",
        "{{ 'x'.encode('idna') }}",
        "{{ 'x'.encode().center(9) }}",
        "{{ 'x'.translate('y') }}",
        "{{ ('x' * 9999).translate({120: 'y' * 9999}) }}",
        "{{ 'x'|center(10001) }}",
        "{{ items|slice(300000)|list }}",
        "{{ items|batch(100001, 'x')|list }}",
        "{{ ('<' * 999999 ~ '<' * 999999)|forceescape }}",
        "{{ ('a ' * 40000)|wordwrap(2) }}",
        "{{ ('a ' * 9999)|wordwrap(2, wrapstring='x' * 999) }}",
        "{{ ('<' * 99999)|e|striptags }}",
        "{{ (('<' * 99999)|e).striptags() }}",
        "{{ (('a' * 9999)|e).replace('a', 'b' * 9999) }}",
        "{{ 'a' * 9999999 }}",
    ],
)
def test_what_only_the_sandbox_lacks_has_a_reason_of_its_own(source: str) -> None:
    with pytest.raises(RequestError, match=r"^unsupported_template$"):
        ours(source)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"]
)
def test_what_the_engine_refuses_too_is_no_lack(source: str) -> None:
    with pytest.raises(RequestError, match=r"^template_failed$"):
        ours(source)


def test_template_tells_what_it_names_and_the_sandbox_lacks() -> None:
    source = "{{ items|random }}{{ lipsum() }}{{ {}.fromkeys([1]) }}{{ random }}{{ a.lipsum }}"
    expected = ["lipsum()", "the filter random", "the method fromkeys"]
    assert ChatTemplate(source, {}).lacking == expected
    assert ChatTemplate("{{ items|pprint }}", {}).lacking == []
