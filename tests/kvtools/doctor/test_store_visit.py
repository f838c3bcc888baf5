"""Whether the doctor finds stores in which tenants meet."""

import json
from typing import Any

import pytest

from extproc.base.engine import Engine, Release
from kvtools.doctor.findings import Severity, Subject
from kvtools.doctor.store_visit import judge_connector, judge_store

ABOUT = Subject("worker")
VLLM, SGLANG = Engine("vllm", Release(0, 32)), Engine("sglang", Release(0, 5, 23))


def with_connector(name: str | None) -> dict[str, Any]:
    transfer = None if name is None else {"kv_connector": name, "kv_role": "kv_both"}
    return {"vllm_config": {"kv_transfer_config": transfer}}


@pytest.mark.parametrize(
    ("engine", "info", "found"),
    [
        (SGLANG, {"hicache_storage_backend": "mooncake"}, ["isolation-store"]),
        (SGLANG, {"enable_lmcache": True}, ["isolation-store"]),
        (SGLANG, {"hicache_storage_backend": None, "enable_lmcache": False}, []),
        (SGLANG, None, []),
        (VLLM, with_connector("LMCacheConnectorV1"), ["isolation-store"]),
        (VLLM, with_connector("OffloadingConnector"), []),
        (VLLM, with_connector(None), []),
        (VLLM, None, [""]),
        (VLLM, {"vllm_config": 5}, [""]),
        (None, {"enable_lmcache": True}, []),
        (Engine("trtllm", Release(1, 0)), {"enable_lmcache": True}, []),
    ],
)
def test_store_that_knows_no_salts_is_found(
    engine: Engine | None, info: dict[str, Any] | None, found: list[str]
) -> None:
    body = b"" if info is None else json.dumps(info).encode()
    findings = list(judge_store(ABOUT, engine, body))
    assert [one.code for one in findings] == found
    assert all(one.verdict is (Severity.WRONG if one.code else Severity.NOTE) for one in findings)


@pytest.mark.parametrize(
    ("engine", "info", "found"),
    [
        (VLLM, with_connector("LMCacheMPConnector"), [""]),
        (VLLM, with_connector("MooncakeStoreConnector"), [""]),
        (VLLM, with_connector("OffloadingConnector"), ["store-media"]),
        (VLLM, with_connector("NixlConnector"), ["store-connector"]),
        (VLLM, with_connector(None), ["store-connector"]),
        (VLLM, None, [""]),
        (SGLANG, {"enable_lmcache": True}, []),
        (None, None, []),
    ],
)
def test_media_of_a_store_are_those_of_a_stores_connector(
    engine: Engine | None, info: dict[str, Any] | None, found: list[str]
) -> None:
    body = b"" if info is None else json.dumps(info).encode()
    findings = list(judge_connector(ABOUT, "s", engine, body))
    assert [one.code for one in findings] == found
