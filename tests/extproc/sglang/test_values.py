"""Values and fields that clients may send one day are read as SGLang 0.5.23's own models read them.

values.jsonl: what its conversions made of each case, without an engine.
"""

import json
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.requests.request import parse
from extproc.templates.chat_template import ChatTemplate
from tests.extproc.sglang.test_recorded_prompts import dialect
from tests.extproc.sglang.values import (
    CASES,
    CHAT,
    MESSAGES,
    RECORDED,
    RESPONSES,
    TEMPLATES,
    Case,
    unknown_fields,
)

# Of so many cases, one has fields added, of each kind of object.
EVERY = 7


def prompt_of(case: Case) -> Any:
    """The prompt of a case, or why it is not keyed."""
    try:
        (prompt,) = parse(case.path, json.dumps(case.body).encode(), lambda _: dialect()).prompts
    except RequestError as error:
        return error.reason
    return prompt


def rendered(case: Case, template: ChatTemplate) -> object:
    prompt = prompt_of(case)
    if isinstance(prompt, str) or not hasattr(prompt, "messages"):
        return prompt if isinstance(prompt, str) else str([*prompt.ids])
    try:
        return template.render(prompt)[0] + prompt.conversion.continued
    except RequestError as error:
        return error.reason


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("column", [0, 1])
def test_values_are_read_as_sglang_read_them(path: str, column: int) -> None:
    template = ChatTemplate(TEMPLATES[column], {})
    recorded = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    others = [
        (case, parsed, row[column])
        for case, row in zip(CASES, recorded, strict=True)
        if case.path == path and row is not None and "input_ids" not in case.body
        if (parsed := rendered(case, template)) != row[column]
    ]
    assert others == []


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_field_that_nobody_knows_unkeys_nothing(path: str) -> None:
    template = ChatTemplate(TEMPLATES[1], {})
    keyed = [case for case in CASES if case.path == path and is_text(rendered(case, template))]
    for case in keyed[::EVERY]:
        for body in unknown_fields(case.body):
            parsed = rendered(case._replace(body=body), template)
            assert is_text(parsed) or parsed == "bad_request", body


def is_text(parsed: object) -> bool:
    return isinstance(parsed, str) and parsed.startswith("[")
