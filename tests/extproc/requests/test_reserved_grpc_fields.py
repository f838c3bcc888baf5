"""A client of gRPC cannot say where a worker fetches KV blocks from, either."""

import struct
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.reserved_grpc_fields import MAX_FIELDS, without_reserved

VLLM = "/vllm.grpc.engine.VllmEngine/Generate"
HOST = {"bootstrap_host": "192.0.2.1", "bootstrap_port": 1, "bootstrap_room": 1}
# By path: the messages of its service, and what only the router may say.
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    VLLM: (
        "vllm_engine",
        {"kv_transfer_params": {"remote_host": "192.0.2.1"}, "kv_transfer_params_json": "{}"},
    ),
    "/sglang.grpc.scheduler.SglangScheduler/Generate": (
        "sglang_scheduler",
        {"disaggregated_params": HOST},
    ),
    "/trtllm.TrtllmService/Generate": (
        "trtllm_service",
        {"disaggregated_params": {"ctx_request_id": "a"}},
    ),
    "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/Generate": (
        "tokenspeed_scheduler",
        {"kv_bootstrap_info": HOST, "encode_bootstrap_info": {"items": [HOST]}},
    ),
}
PARTS = st.lists(st.sampled_from(["own", "request_id", "tokenized", "sampling"]), max_size=6)


def message_of(path: str, fields: dict[str, Any]) -> Any:
    name = OWN[path][0]
    why = "smg-grpc-proto is not installed"
    module = pytest.importorskip(f"smg_grpc_proto.generated.{name}_pb2", reason=why)
    return ParseDict(fields, module.GenerateRequest())


def framed(message: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(message)) + message


@pytest.mark.parametrize("path", OWN)
@given(PARTS, st.text(max_size=9), st.sampled_from([1, 131_072]))
def test_without_reserved_cuts_a_clients_fields_out_of_messages_of_grpc(
    path: str, parts: list[str], text: str, times: int
) -> None:
    sampling = "sampling_config" if "trtllm" in path else "sampling_params"
    has = {
        "own": OWN[path][1],
        "request_id": {"request_id": text * times},
        "tokenized": {"tokenized": {"original_text": "a"}},
        "sampling": {sampling: {"temperature": 1.0}},
    }
    wire, expected = (
        b"".join([message_of(path, has[part]).SerializeToString() for part in kept])
        for kept in (parts, [part for part in parts if part != "own"])
    )
    body = framed(wire)
    cut = without_reserved(path, body)
    assert cut == framed(expected)
    assert (cut is body) == ("own" not in parts)


# kv_transfer_params, with a tag or length that is longer than need be, or of another type
@pytest.mark.parametrize("own", [b"\xb2\x00\x00", b"\x32\x80\x00", b"\x30\x01", b"\x35abcd"])
def test_without_reserved_knows_a_field_however_it_is_written(own: bytes) -> None:
    assert without_reserved(VLLM, framed(b"\x0a\x01r" + own)) == framed(b"\x0a\x01r")


def test_body_of_another_path_is_left_as_it_is() -> None:
    body = framed(b"\x32\x00")
    assert without_reserved("/vllm.grpc.engine.VllmEngine/Embed", body) is body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        framed(b"\x0a\x01r", flags=1),
        framed(b"\x0a\x01r") + framed(b"\x32\x00"),
        framed(b"\x0a\x09r"),
        framed(b"\x33\x34"),
        framed(b"\x02\x00"),
        framed(b"\x80" * 11),
        framed(b"\x28\x01" * (MAX_FIELDS + 1)),
    ],
    ids=["empty", "compressed", "two", "cut-off", "group", "zero", "endless", "many"],
)
def test_without_reserved_refuses_messages_that_it_cannot_read_with_certainty(body: bytes) -> None:
    assert without_reserved(VLLM, body) is None
