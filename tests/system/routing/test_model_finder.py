"""A real Envoy finds the model in a body as the engines do, while no router names it."""

import asyncio
import http.client
import json
from collections.abc import Callable
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Config, Model, WorkerSettings
from extproc.envoy.envoy_config import render
from extproc.envoy.model_finder import STEPS
from tests.ports import free_port
from tests.system.envoy_process import running_envoy

NAMES = ["tiny", "haiku", "org/big", "Ü\U0001f600", 'a"\\b']
MODELS = (Model("tiny", aliases=("haiku",)), Model("org/big", lora=("Ü\U0001f600", 'a"\\b')))
SERVED = {"tiny": "tiny", "haiku": "tiny", "org/big": "org/big"}
SERVED |= dict.fromkeys(NAMES[3:], "org/big")

_TEXTS = st.sampled_from([*NAMES, "model", '"model": "tiny"', "\\", '\\"', "\x07 ", "ü"]) | st.text(
    max_size=5
)
_KEYS = st.sampled_from(["model", "model", "messages", "metadata", "\\model"]) | _TEXTS
_LEAVES = _TEXTS | st.none() | st.integers() | st.floats() | st.booleans()
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(_KEYS, inner), max_size=3),
    max_leaves=8,
)
_INNER = st.lists(st.tuples(st.just("model"), st.sampled_from(NAMES)), min_size=1, max_size=1)
_MEMBERS = st.lists(st.tuples(_KEYS, _VALUES | _INNER), min_size=1, max_size=6)


# Draws a value from a strategy.
Draw = Callable[[st.SearchStrategy[str]], str]


def written(value: Any, draw: Draw) -> str:
    """JSON of a value, where lists of pairs are objects; with escapes and white space by chance."""
    space: str = draw(st.sampled_from(["", "", " ", "\n\t"]))
    if isinstance(value, str):
        return space + text_of(value, draw) + space
    if isinstance(value, list) and value and all(isinstance(one, tuple) for one in value):
        members = (f"{written(name, draw)}:{written(one, draw)}" for name, one in value)
        return f"{space}{{{','.join(members)}}}{space}"
    if isinstance(value, list):
        return f"[{space}{','.join(written(one, draw) for one in value)}]"
    return json.dumps(value) + space


def text_of(value: str, draw: Draw) -> str:
    """JSON of a text, all of it escaped, what is beyond ASCII, or what has to be."""
    how = draw(st.sampled_from(["all", "beyond", "least"]))
    if how != "all":
        return json.dumps(value, ensure_ascii=how == "beyond")
    units = value.encode("utf-16-be", "surrogatepass").hex()
    return '"' + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) + '"'


def named(body: bytes) -> str:
    """The model that the engines' Python reads in a body, by its configured name."""
    model = json.loads(body).get("model")
    return SERVED.get(model, "") if isinstance(model, str) else ""


class Asking:
    """A client of the Envoy, whose answers tell which model it found."""

    def __init__(self, port: int) -> None:
        self._client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.close = self._client.close

    def found(self, body: bytes) -> str:
        """The model that Envoy found in a body, "" for none."""
        self._client.request("POST", "/v1/messages", body)
        answer = self._client.getresponse()
        answer.read()
        return answer.headers.get("x-found", "").encode("latin-1").decode()


def reflecting(listen: int, admin: int) -> str:
    """The configuration for two models without the router, whose routes tell the header."""
    workers = (WorkerSettings("127.0.0.1:1", "tiny"), WorkerSettings("127.0.0.1:2", "org/big"))
    tree = yaml.safe_load(render(Config(models=MODELS, workers=workers)))
    (listener,) = tree["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = listen
    tree["admin"]["address"]["socket_address"]["port_value"] = admin
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["http_filters"][0]
    (host,) = manager["route_config"]["virtual_hosts"]
    header = {"header": {"key": "x-found", "value": "%REQ(x-kvsteer-model)%"}}
    host["routes"] = [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}]
    host["response_headers_to_add"] = [header]
    return yaml.safe_dump(tree)


async def test_model_is_the_one_that_python_reads() -> None:
    listen, admin = free_port(), free_port()

    def every_body() -> None:
        asking = Asking(listen)

        @given(_MEMBERS, st.data())
        def body_is_read(members: list[tuple[str, Any]], data: st.DataObject) -> None:
            body = written(members, data.draw).encode("utf-8", "surrogatepass")
            assert asking.found(body) == named(body)

        body_is_read()
        asking.close()

    async with running_envoy(reflecting(listen, admin), admin):
        await asyncio.to_thread(every_body)


BODIES = [
    b'{"messages":[{"input":{"model":"haiku"}}],"model":"org/big"}',
    b'{"model":"org/big","metadata":{"model":"tiny"}}',
    b'{"model":"tiny","model":"org/big"}',
    b'{"model":"tiny","model":null}',
    b'{"a":"\\\\","m\\u006fdel" : "t\\u0069ny","b":"\\"model\\":\\"org/big\\""}',
    b'\xef\xbb\xbf{"x":["model"],"model":"haiku"}',
]


async def test_model_is_the_last_of_the_outermost_object() -> None:
    listen, admin = free_port(), free_port()
    async with running_envoy(reflecting(listen, admin), admin):
        asking = Asking(listen)
        found = [await asyncio.to_thread(asking.found, body) for body in BODIES]
        asking.close()
    assert found == ["org/big", "org/big", "org/big", "", "tiny", "tiny"]
    assert found == [named(body) for body in BODIES]


async def test_odd_bodies_end_without_a_model() -> None:
    listen, admin = free_port(), free_port()
    many = b'{"a":[' + b'"",' * (STEPS // 2) + b'""],"model":"tiny"}'
    odd = [b"", b"[]", b'"model"', b'{"model":"tiny', b'{"model":"tin\\', b"{" * 99, many]
    async with running_envoy(reflecting(listen, admin), admin):
        asking = Asking(listen)
        found = [await asyncio.to_thread(asking.found, body) for body in odd]
        asking.close()
    assert found == [""] * len(odd)
