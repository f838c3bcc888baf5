import itertools
import json
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from json.encoder import c_make_encoder  # type: ignore[attr-defined]
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError
from extproc.requests.known_tools import PrintedTool
from extproc.templates.bounds import MAX_CHARACTERS, Tick
from extproc.templates.chat_template import Sandbox, rendered, writer_by

NOON = datetime(2026, 7, 4, 12)


def render(source: str, monotonic: Callable[[], float] = lambda: 0.0, **variables: Any) -> str:
    environment = Sandbox(lambda: NOON)
    template = environment.compiled(environment.parse(source))
    return rendered(template, variables, Tick(1.0, monotonic, monotonic))


def refusal(source: str, monotonic: Callable[[], float] = lambda: 0.0) -> str:
    with pytest.raises(RequestError) as caught:
        render(source, monotonic)
    return caught.value.reason


def a_second_each_time() -> Callable[[], float]:
    return itertools.count().__next__


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for n in [1, 2] %}\n  {% if true %}\n{{ n }}\n  {% endif %}\n{% endfor %}"
    assert render(source) == "1\n2\n"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(JSON)
def test_tojson_writes_any_value_as_the_standard_library_does(value: object) -> None:
    assert render("{{ value | tojson }}", value=value) == json.dumps(value, ensure_ascii=False)


def test_tojson_writes_as_transformers_does() -> None:
    assert render("{{ tools | tojson }}", tools=[{"a": "é<"}]) == '[{"a": "é<"}]'
    assert render("{{ tools | tojson(indent=2) }}", tools=[1]) == "[\n  1\n]"
    assert render("{{ tools | tojson(separators=(',', ':')) }}", tools=[1, 2]) == "[1,2]"


def test_generation_block_renders_its_content() -> None:
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    scoped = "{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}"
    assert render(scoped) == "1"


def test_loop_controls_and_macros_are_supported() -> None:
    source = "{% for n in range(9) %}{{ n }}{% if n == 1 %}{% break %}{% endif %}{% endfor %}"
    assert render(source) == "01"
    assert render("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('a') }}") == "aa"


def test_strftime_now_is_supported() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "04 Jul 2026"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_template_that_raises_gives_a_reason(source: str) -> None:
    assert refusal(source) == "template_failed"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 9999999 }}",
        "{{ 9999999 * [1] }}",
        "{{ 2 ** 9999999 }}",
        "{{ 'a' * 999999 * 999999 }}",
    ],
)
def test_product_that_only_an_engine_computes_has_a_reason_of_its_own(source: str) -> None:
    assert refusal(source) == "unsupported_template"


def test_small_products_are_computed() -> None:
    assert (
        render("{{ 'ab' * 2 }}{{ 3 * 4 }}{{ 2 ** 8 }}{{ 0 * 5 }}{{ 1.5 * 2 }}") == "abab1225603.0"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% for n in range(9) %}{% set x = n %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(9) }}",
        "{% for n in [1] %}{% for m in range(9) %}{% endfor %}{% endfor %}",
    ],
)
def test_slow_template_is_ended(source: str) -> None:
    assert refusal(source, a_second_each_time()) == "template_too_slow"
    assert isinstance(render(source), str)


def test_oversized_text_is_ended() -> None:
    source = "{%% for n in range(%d) %%}{{ 'a' * 524288 }}{%% endfor %%}"
    assert len(render(source % 16)) == MAX_CHARACTERS
    assert refusal(source % 17) == "too_many_characters"


def test_parse_refuses_a_malformed_template() -> None:
    with pytest.raises(jinja2.TemplateError):
        Sandbox(lambda: NOON).parse("{% for %}")


def test_namespace_may_be_made_where_a_loop_holds_another() -> None:
    source = (
        "{% for n in [1, 2] %}{% set a = namespace(x=n) %}{% for m in [1] %}"
        "{% set b = namespace(y=a.x) %}{{ b.y }}{% endfor %}{% endfor %}"
    )
    assert render(source) == "12"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize("make", [c_make_encoder, None])
@given(values)
def test_json_is_written_as_the_standard_library_writes_it(make: Any, value: object) -> None:
    assert writer_by(make)(value) == json.dumps(value, ensure_ascii=False)


KEYS = ["role", "content", "items", "get", "pop", "clear", "__class__", "_json", ""]


@pytest.mark.parametrize("kind", [dict, OrderedDict, PrintedTool, str])
@given(st.sets(st.sampled_from(KEYS)), st.sampled_from(KEYS))
def test_attributes_are_those_of_the_sandbox(kind: Any, names: set[str], name: str) -> None:
    value, ours = kind(dict.fromkeys(sorted(names), 1)), Sandbox(datetime.now)
    theirs = super(Sandbox, ours).getattr(value, name)
    found = ours.getattr(value, name)
    assert type(found) is type(theirs)
    assert found == theirs or found._undefined_message == theirs._undefined_message
