"""Templates of a hostile model directory: each ends in time and within its memory."""

import resource
import time
from datetime import datetime
from typing import Any

import jinja2
import pytest

from extproc.base.errors import RequestError
from extproc.templates.bounds import Tick
from extproc.templates.chat_template import Sandbox, rendered
from tests.limited import limited

MEBIBYTE = 1 << 20
MAX_MEBIBYTES = 400
BUDGET_SECONDS = 0.25
MAX_SECONDS = 2.0

DOUBLED = "{% set a = 'x' * 1000 %}"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

LONG = {
    "sets the tick": "{% set kvsteer_tick_ = namespace %}" + NESTED,
    "gets the tick": "{% set kvsteer_tick_ = [1]|map('kvsteer measure')|list %}" + NESTED,
    "loops": NESTED,
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "call blocks": "{% macro f() %}" + "{{ caller() }}" * 300 + "{% endmacro %}"
    "{% call f() %}{% call f() %}{% call f() %}{% call f() %}x{% endcall %}{% endcall %}"
    "{% endcall %}{% endcall %}",
    "center": "{{ 'x'.center(2000000000) }}",
    "center in a loop": "{% for a in range(99999) %}{{ 'x'.center(9999) }}{% endfor %}",
    "ljust": "{{ 'x'.ljust(2000000000) }}",
    "rjust": "{{ 'x'.rjust(2000000000) }}",
    "zfill": "{{ '1'.zfill(2000000000) }}",
    "zfill by name": "{{ '1'.zfill(width=2000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "expandtabs of many": "{{ ('\\t' * 900000).expandtabs(9999) }}",
    "format width": "{{ '{:>2000000000}'.format(1) }}",
    "format width given": "{{ '{:>{}}'.format(1, 2000000000) }}",
    "format of much": "{{ ('{0}' * 9999).format('x' * 900000) }}",
    "format_map": "{{ '{a:>2000000000}'.format_map({'a': 1}) }}",
    "percent": "{{ '%2000000000d' % 1 }}",
    "percent given": "{{ '%*d' % (2000000000, 1) }}",
    "percent of a variable": "{% set p = '%2000000000d' %}{{ p % 1 }}",
    "percent of much": "{{ ('%(a)s' * 9999) % {'a': 'x' * 900000} }}",
    "format filter": "{{ '%2000000000d'|format(1) }}",
    "center filter": "{{ 'x'|center(2000000000) }}",
    "indent filter": "{{ ('\\n' * 900000)|indent(9999) }}",
    "wide indent filter": "{{ 'x\\nx'|indent(2000000000) }}",
    "indent of a text": "{{ ('\\n' * 900000)|indent('x' * 900000) }}",
    "replace": "{{ ('x' * 900000).replace('x', 'y' * 90000) }}",
    "replace of nothing": "{{ ('x' * 900000).replace('', 'y' * 90000) }}",
    "replace filter": "{{ ('x' * 900000)|replace('x', 'y' * 90000) }}",
    "join": "{{ ('x' * 900000).join(['a'] * 90000) }}",
    "join of a text": "{{ ('x' * 9000).join('x' * 900000) }}",
    "join filter": "{{ range(99999)|join('x' * 900000) }}",
    "join of a map": "{{ range(99999)|map('default', 'x')|map('replace', '', 'y' * 9999)|join }}",
    "translate": "{{ ('x' * 900000).translate({120: 'y' * 90000}) }}",
    "bytes": "{{ 'x'.encode().center(2000000000) }}",
    "to_bytes": "{{ (1).to_bytes(2000000000, 'big') }}",
    "fromkeys": "{{ {}.fromkeys(range(99999), 'x' * 900000) }}",
    "doubled": DOUBLED + "{% set a = a ~ a %}" * 40 + "{{ a|length }}",
    "doubled with +": DOUBLED + "{% set a = a + a %}" * 40 + "{{ a|length }}",
    "doubled in a block": DOUBLED + "{% set a %}{{ a }}{{ a }}{% endset %}" * 40,
    "doubled in a namespace": "{% set n = namespace(a='x') %}" + "{% set n.a = n.a ~ n.a %}" * 40,
    "doubled in a loop": "{% set n = namespace(a='x') %}{% for i in range(40) %}"
    "{% set n.a = n.a ~ n.a %}{% endfor %}",
    "doubled by a macro": "{% macro f(a, n) %}{% if n %}{{ f(a ~ a, n - 1) }}{% endif %}"
    "{% endmacro %}{{ f('xx', 40) }}",
    "doubled by a macro's text": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% else %}"
    "{{ 'x' * 900000 }}{% endif %}{% endmacro %}{{ f(9) ~ f(9) }}",
    "doubled by with": "".join(f"{{% with a{n + 1} = a{n} ~ a{n} %}}" for n in range(15))
    .replace("a0", "('x' * 900000)") + "{% endwith %}" * 15,
    "doubled in an expression": "{% set a = 'x' * 900000 %}{{ ("
    + " ~ ".join("a" * 4000) + ")|length }}",
    "added in an expression": "{% set a = 'x' * 900000 %}{{ ("
    + " + ".join("a" * 80) + ")|length }}",
    "doubled lists": "{% set a = [1] %}" + "{% set a = a + a %}" * 40,
    "lists of lists": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 40 + "{{ a|tojson }}",
    "lists of lists as text": "{% set a = [1] %}" + "{% set a = [a, a] %}" * 40 + "{{ a ~ '' }}",
    "dicts of dicts": "{% set a = 1 %}" + "{% set a = dict(b=a, c=a) %}" * 40 + "{{ a }}",
    "dict literals": "{% set a = 1 %}" + "{% set a = {'b': a, 'c': a} %}" * 40 + "{{ a }}",
    "namespaces": "{% set a = 1 %}" + "{% set a = namespace(b=a, c=a) %}" * 40 + "{{ a }}",
    "arguments": "{% macro f() %}{% if varargs|string|length %}{{ f(varargs, varargs) }}{% endif %}"
    "{% endmacro %}{{ f(1) }}",
    "list of a long text": "{{ [('x' * 900000)] * 99999 }}",
    "tojson indent": "{{ [1]|tojson(indent=700000000) }}",
    "tojson separators": "{{ [1, 2]|tojson(separators=('x' * 900000, 'y')) }}",
    "sum of lists": "{{ ([[1] * 9999] * 99)|sum(start=[]) }}",
    "sum of lists by place": "{{ ([[1] * 9999] * 99)|sum(none, []) }}",
    "maps of maps": "{{ [range(99999)]|map('map', 'string')|map('list')|map('length')|list }}",
    "maps of sums": "{{ ([range(99999)] * 9999)|map('sum')|list }}",
    "sorted again and again": "{{ ([range(99999)] * 9999)|map('sort')|list|length }}",
    "lists of letters": "{{ (['x' * 900000] * 30)|map('list')|list|length }}",
    "batch": "{{ [1]|batch(99999999, 'x')|list }}",
    "batch of many": "{{ [1]|batch(99999, 'x')|list }}",
    "slices": "{{ [1]|slice(99999)|list|string|length }}",
    "slices of slices": "{{ [range(99999)]|map('slice', 99999)|map('list')|list }}",
    "groups": "{{ (range(99999)|map('string')|list)|groupby('x', default='y')|string|length }}",
    "groups again and again": "{{ ([range(99999)] * 9999)|map('groupby', 'x', default='y')|list }}",
    "escaped": "{{ ('<' * 900000)|e|forceescape|forceescape|forceescape|forceescape }}",
    "quoted": "{{ ('ä' * 900000)|urlencode|urlencode|urlencode|urlencode|urlencode }}",
    "attributes": "{{ {'a': '<' * 900000}|xmlattr|forceescape }}",
    "tags": "{{ ('<!--' * 16000)|striptags }}",
    "tags of a safe text": "{{ (('<!--' * 16000)|safe).striptags() }}",
    "links": "{{ ('www.a.com/' * 6000)|urlize }}",
    "one long link": "{{ ('www.' ~ 'a.' * 30000)|urlize }}",
    "brackets in a link": "{{ ('(' * 30000 ~ 'www.a.com' ~ ')' * 30000)|urlize }}",
    "wrapped": "{{ ('a' * 60000)|wordwrap(1) }}",
    "wrapped words": "{{ ('a ' * 30000)|wordwrap(1, wrapstring='x' * 100)|length }}",
    "printed": "{{ ('word ' * 13000)|pprint|length }}",
    "printed lists": "{{ [[1] * 200]|pprint|length }}",
    "printed again and again": "{{ ([['x' * 200] * 200] * 9999)|map('pprint')|list|length }}",
    "safe replace": "{{ (('x' * 900000)|e).replace('x', 'y' * 90000) }}",
    "safe join": "{{ (('<' * 900000)|e).join(['a'] * 90000) }}",
    "safe width": "{{ ('x'|e).center(2000000000) }}",
    "encoded": "{{ ('x' * 900000).encode('punycode') }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "shifted": "{{ 10 ** 200000 * 10 ** 200000 * 10 ** 200000 * 10 ** 200000 }}",
    "lipsum": "{{ lipsum(n=99999) }}",
    "date": "{{ strftime_now('%2000000000d') }}",
    "long date": "{{ strftime_now('%c' * 400000) }}",
    "cycler": "{% set c = cycler(1) %}{{ range(99999)|map('string')|map('upper')|join|length }}",
}  # fmt: skip

ESCAPES = [
    "{{ ''.__class__ }}", "{{ ''['__class__'] }}", "{{ ''|attr('__class__') }}",
    "{{ ['']|map(attribute='__class__')|list }}", "{{ '{0.__class__}'.format('') }}",
    "{{ '{a.__class__}'.format_map({'a': ''}) }}", "{{ '{0.__class__}'|format('') }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}", "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}", "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{{ ([namespace]|map('kvsteer measure')|list)[0].__init__.__globals__ }}",
    "{{ [1].append(2) }}", "{{ {}.update({1: 1}) }}",
    "{{ joiner.__call__.__globals__ }}", "{{ (1).__class__.__base__.__subclasses__() }}",
    "{{ ['a']|map('attr', '__class__')|list }}", "{{ range.__self__ }}",
]  # fmt: skip


def outcome(source: str) -> dict[str, Any]:
    """What a template comes to: its reason or text, CPU seconds, MiB of memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    said, cause = "", ""
    try:
        environment = Sandbox(datetime.now)
        template = environment.compiled(environment.parse(source))
        said = rendered(template, {}, Tick(BUDGET_SECONDS))
    except RequestError as error:
        said, cause = error.reason, type(error.__context__).__name__
    except jinja2.TemplateError as error:
        said = str(error)
    mebibytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "said": said[:200],
        "cause": cause,
        "seconds": time.thread_time() - began,
        "mebibytes": mebibytes,
    }


@pytest.mark.parametrize("name", LONG)
def test_hostile_template_ends_in_time_and_within_its_memory(name: str) -> None:
    found = limited(outcome, LONG[name], gibibytes=3, cpu_seconds=20, wait_seconds=60)
    assert found["cause"] != "MemoryError", found
    assert found["seconds"] < MAX_SECONDS, found
    assert found["mebibytes"] < MAX_MEBIBYTES, found


@pytest.mark.parametrize("source", ESCAPES)
def test_hostile_template_stays_within_the_sandbox(source: str) -> None:
    said = outcome(source)["said"]
    assert not any(word in said for word in ("class", "function", "object at", "root:", "{'"))
