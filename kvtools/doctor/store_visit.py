"""Asks a worker for its store: whether tenants meet there, and whether it is the configured one.

SGLang names the blocks of its storage backend, and those that it gives to LMCache, by their tokens
alone (0.5.18 to 0.5.23, the contract of `RadixKey` in mem_cache/radix_cache.py; sglang#37160). So
does vLLM's LMCacheConnectorV1 (LMCache#2878). Others get vLLM's own hashes, which salts go into.
"""

from collections.abc import Iterator

import msgspec

from extproc.base.engine import SGLANG, VLLM, Engine
from extproc.config.schema import WorkerSettings
from kvtools.doctor.findings import Finding, Subject
from kvtools.doctor.priority_visit import PATH
from kvtools.doctor.shared_stores import mounts
from kvtools.doctor.worker_visit import VisitTools, WorkerReport

CHECK = "isolation"
_BY_TOKENS = ("LMCacheConnectorV1",)

# Connectors that publish blocks of a store as those of host memory, and of their own host memory.
STORES = "stores"
_OF_STORES = ("LMCacheConnectorV1", "LMCacheMPConnector", "MooncakeStoreConnector")
_OF_HOST = ("OffloadingConnector", "SimpleCPUOffloadConnector")


class _Transfer(msgspec.Struct):
    kv_connector: str | None = None


class _EngineConfig(msgspec.Struct):
    kv_transfer_config: _Transfer | None = None


class _StoreInfo(msgspec.Struct):
    vllm_config: _EngineConfig | None = None
    hicache_storage_backend: str | None = None
    enable_lmcache: bool = False


async def visit(
    tools: VisitTools, worker: WorkerSettings, visited: WorkerReport, about: Subject
) -> list[Finding]:
    """Returns the findings about a worker's store; none without isolation and `media`."""
    stores = [one for one in tools.config.stores if one.media and worker.endpoint in mounts(one)]
    if tools.config.isolation is None and not stores:
        return []
    answer = await tools.web.get(f"http://{worker.endpoint}{PATH}")
    info, found = answer.body if answer.is_ok else b"", list[Finding]()
    if tools.config.isolation is not None:
        found += judge_store(about, visited.engine, info)
    for one in stores:
        found += judge_connector(about, one.name, visited.engine, info)
    return found


def judge_store(about: Subject, engine: Engine | None, info: bytes) -> Iterator[Finding]:
    """Yields whether an engine shares a store that knows no salts.

    engine: None if it is unknown. info: its answer to /server_info; b"" if missing.
    """
    if engine is None or engine.name not in (VLLM, SGLANG):
        return  # said elsewhere
    answer = _read_info(info)
    if engine.name == VLLM and answer.vllm_config is None:
        says = "not checked: whether the engine has a KV store, which vLLM says only with"
        yield about.note(CHECK, f"{says} VLLM_SERVER_DEV_MODE=1")
        return
    store = _store_of(answer)
    if store:
        yield about.wrong("isolation-store", f"{store} names blocks without salts: tenants meet")


def _store_of(info: _StoreInfo) -> str:
    """Returns the store that knows no salts, "" if there is none."""
    if info.enable_lmcache:
        return "LMCache"
    if info.hicache_storage_backend:
        return f"the storage backend {info.hicache_storage_backend:.40}"
    connector = _connector_of(info)
    return connector if connector in _BY_TOKENS else ""


def _connector_of(info: _StoreInfo) -> str:
    """Returns the connector of vLLM, "" if it has none."""
    transfer = None if info.vllm_config is None else info.vllm_config.kv_transfer_config
    return (transfer and transfer.kv_connector) or ""


def judge_connector(
    about: Subject, store: str, engine: Engine | None, info: bytes
) -> Iterator[Finding]:
    """Yields whether what an engine publishes of host memory lies in the store, as configured.

    engine, info: as of `judge_store`. vLLM only; others do not say it.
    """
    if engine is None or engine.name != VLLM:
        return
    answer = _read_info(info)
    connector = _connector_of(answer)
    if answer.vllm_config is None:
        says = "not checked: whether its connector is one of a store, which vLLM says only with"
        yield about.note(STORES, f"{says} VLLM_SERVER_DEV_MODE=1")
    elif connector in _OF_STORES:
        yield about.right(STORES, f"{connector} puts blocks into {store}")
    elif connector in _OF_HOST:
        says = f"{connector} keeps blocks in its own host memory, which count as those of {store}"
        yield about.wrong("store-media", says)
    else:
        named = f"{connector:.40} is no connector of a store that is known" if connector else ""
        yield about.wrong("store-connector", named or f"it has no KV connector, so no {store}")


def _read_info(info: bytes) -> _StoreInfo:
    try:
        return msgspec.json.decode(info, type=_StoreInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _StoreInfo()
