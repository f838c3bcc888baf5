"""Nothing is unkeyed because a field in it is new (tests/engines compares the ids with vLLM)."""

import json

import pytest

from extproc.base.errors import RequestError
from extproc.requests.dialect import NEWEST
from extproc.requests.prompt import Chat
from extproc.requests.request import parse
from tests.extproc.requests.planted_fields import REQUESTS, Planted, planted

PLANTED = list(planted())

# What the engine's models refuse: a known field with a value of another type.
REFUSED = {"/v1/messages thinking='hm'"}


def chat(path: str, body: object) -> Chat:
    (prompt,) = parse(path, json.dumps(body).encode(), lambda _: NEWEST).prompts
    assert isinstance(prompt, Chat)
    return prompt


def test_fields_are_planted_in_all_kinds_of_objects() -> None:
    places = {one.place.split(" kvsteer_new")[0] for one in PLANTED if "kvsteer_new" in one.place}
    assert {place for place in places if place.startswith("/v1/chat")} >= {
        "/v1/chat/completions",
        "/v1/chat/completions messages<user>",
        "/v1/chat/completions messages<user> content<text>",
        "/v1/chat/completions messages<assistant> tool_calls<function>",
        "/v1/chat/completions tools<function>",
        "/v1/chat/completions tools<function> function",
        "/v1/chat/completions stream_options",
    }
    assert len(places) > 30


@pytest.mark.parametrize("path", [path for path, _ in REQUESTS])
def test_request_with_a_field_more_is_keyed(path: str) -> None:
    unkeyed = []
    for one in PLANTED:
        if one.path != path or one.place in REFUSED:
            continue
        try:
            chat(one.path, one.body)
        except RequestError as error:
            unkeyed.append((one.place, error.reason))
    assert unkeyed == []


@pytest.mark.parametrize("path", [path for path, _ in REQUESTS])
def test_field_that_no_release_knows_changes_no_tool_and_no_message(path: str) -> None:
    def shown(one: Planted) -> object:
        made = chat(one.path, one.body)
        return made.variables.get("tools"), made.messages

    plain, *others = [one for one in PLANTED if one.path == path]
    new = [one for one in others if "kvsteer_new" in one.place and "content<text>" not in one.place]
    kept = {one.place for one in new if shown(one) != shown(plain)}
    # of calls, templates get all that the client wrote
    assert {place.partition(" kvsteer_new")[0] for place in kept} <= {
        "/v1/chat/completions messages<assistant> tool_calls<function>",
        "/v1/chat/completions messages<assistant> tool_calls<function> function",
        "/v1/responses input<message> content<input_text>",
    }
