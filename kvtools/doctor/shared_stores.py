"""Checks whether workers tell what they put into a store that they share (`stores`)."""

from collections.abc import Collection, Iterator

from extproc.base.engine import VLLM, Engine
from extproc.config.feed_kinds import kind_in
from extproc.config.schema import Config, WorkerEvents, WorkerSettings
from extproc.config.sections import StoreSettings
from kvtools.doctor.findings import Finding, Subject, name_list

CHECK = "stores"

# The first release whose events name the locality of blocks.
FIRST_RELEASE = (0, 26)


def mounts(store: StoreSettings) -> Collection[str]:
    """Returns the endpoints that mount a store, as far as they are configured."""
    return store.workers or ()


def judge_mounts(config: Config, workers: Collection[str]) -> Iterator[Finding]:
    """Yields whether the workers that mount stores are there; nothing without stores.

    workers: the endpoints of those that are configured or discovered.
    """
    about = Subject("configuration")
    for store in config.stores:
        missing = sorted(set(mounts(store)) - set(workers))
        if missing:
            says = f"{store.name} names workers that are not there: {name_list(missing)}"
            yield about.wrong("store-worker", says)
        else:
            yield about.right(CHECK, f"{store.name} is configured")


def judge_publisher(
    config: Config, worker: WorkerSettings, engine: Engine | None, about: Subject
) -> Iterator[Finding]:
    """Yields whether a worker that mounts a store tells what it puts there.

    engine: None if it is unknown.
    """
    stores = [one for one in config.stores if one.workers is None or worker.endpoint in one.workers]
    if not stores:
        return
    if worker.events is None:
        yield about.wrong("store-events", "it has no events, so nothing tells what it stores")
    elif any(one.media or one.zmq for one in stores):
        says = f"{engine or 'the engine'} tells of blocks that its store may have"
        yield about.right(CHECK, says)
    elif isinstance(worker.events, WorkerEvents) and not kind_in(worker.events).names_stored:
        yield about.wrong("store-events", "only its events over ZMQ would name a store's blocks")
    elif engine is None:
        yield about.note(CHECK, "not checked: the worker does not tell its engine and release")
    elif engine.name != VLLM or engine.release < FIRST_RELEASE:
        says = f"{engine} does not tell which blocks lie in a store: vLLM 0.26 is the first"
        is_named = any(one.workers is not None for one in stores)
        yield about.wrong("store-engine", says) if is_named else about.note(CHECK, says)
    else:
        says = f"{engine} tells of blocks in a store, whole with `self_describing_kv_events`"
        yield about.right(CHECK, says)
