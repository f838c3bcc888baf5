"""Asks a worker whether tenants meet in a store outside its engine, which `isolation` forbids.

SGLang names the blocks of its storage backend, and those that it gives to LMCache, by their tokens
alone (0.5.18 to 0.5.23, the contract of `RadixKey` in mem_cache/radix_cache.py; sglang#37160). So
does vLLM's LMCacheConnectorV1 (LMCache#2878). Others get vLLM's own hashes, which salts go into.
"""

from collections.abc import Iterator

import msgspec

from extproc.base.engine import SGLANG, VLLM, Engine
from extproc.commands.doctor.findings import Finding, Subject
from extproc.commands.doctor.priority_visit import PATH
from extproc.commands.doctor.worker_visit import Means, WorkerReport
from extproc.config.schema import WorkerSettings

CHECK = "isolation"
_BY_TOKENS = ("LMCacheConnectorV1",)


class _Transfer(msgspec.Struct):
    kv_connector: str | None = None


class _EngineConfig(msgspec.Struct):
    kv_transfer_config: _Transfer | None = None


class _StoreInfo(msgspec.Struct):
    vllm_config: _EngineConfig | None = None
    hicache_storage_backend: str | None = None
    enable_lmcache: bool = False


async def visit(
    means: Means, worker: WorkerSettings, visited: WorkerReport, about: Subject
) -> list[Finding]:
    """Returns the findings about a worker's store; none without isolation."""
    if means.config.isolation is None:
        return []
    answer = await means.web.get(f"http://{worker.endpoint}{PATH}")
    return list(judge_store(about, visited.engine, answer.body if answer.is_ok else b""))


def judge_store(about: Subject, engine: Engine | None, info: bytes) -> Iterator[Finding]:
    """Yields whether an engine shares a store that knows no salts.

    engine: None if it is unknown. info: its answer to /server_info; b"" if missing.
    """
    if engine is None or engine.name not in (VLLM, SGLANG):
        return  # said elsewhere
    try:
        told = msgspec.json.decode(info, type=_StoreInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = _StoreInfo()
    if engine.name == VLLM and told.vllm_config is None:
        says = "not checked: whether the engine has a KV store, which vLLM says only with"
        yield about.note(CHECK, f"{says} VLLM_SERVER_DEV_MODE=1")
        return
    store = _store_of(told)
    if store:
        yield about.wrong("isolation-store", f"{store} names blocks without salts: tenants meet")


def _store_of(told: _StoreInfo) -> str:
    """Returns the store that knows no salts, "" if there is none."""
    if told.enable_lmcache:
        return "LMCache"
    if told.hicache_storage_backend:
        return f"the storage backend {told.hicache_storage_backend:.40}"
    transfer = None if told.vllm_config is None else told.vllm_config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    return connector if connector in _BY_TOKENS else ""
