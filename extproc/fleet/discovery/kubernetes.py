"""Workers among the pods of a Kubernetes cluster: those of a label selector or an InferencePool.

Needs the extra `kubernetes`, whose client knows kubeconfigs, service accounts and credential
plugins. Its watch helper is not used: it does not report when a watch was accepted, so a quiet
watch could not be confirmed; it decodes whole objects; and lists would have to be bounded here
anyway.

The copy of the objects comes from one list, and watches from the list's version keep it current, as
the API conventions describe: each watch continues from the last resourceVersion seen, in an event
or a bookmark. 410 Gone, as a status or as an event, means that the version is too old, and the
objects are listed again: at once, unless the last list did not help. Whatever fails is tried again,
and the copy stays meanwhile.

The copy is confirmed only while it is known to be current. An accepted watch proves nothing: a
restarted server answers 200, and only then sends an event that the version is gone.

A credential from a kubeconfig's command or token file expires. It is renewed shortly before, if the
time is known, and when the server refuses it (401), as client-go does with credential plugins
(https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins).
The client itself re-reads the token of our own pod.
"""

import asyncio
import datetime as dt
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import aiohttp
import msgspec

from extproc.base.address import MAX_PORT
from extproc.base.errors import DiscoveryError, importing_extra
from extproc.config.schema import Config, Kubernetes
from extproc.fleet.discovery.pods import (
    MAX_PORTS,
    PAGE,
    Engines,
    Pod,
    PodSettings,
    Pool,
    PoolSpec,
    Thing,
    WatchEvent,
    read_event,
    read_listing,
    read_refusal,
    read_thing,
    read_version,
)
from extproc.fleet.discovery.view import PartReports, SourceReport
from kvstate.feeds.backoff import Backoff

# The client's own log of failures is off: this source reports them as faults.
logging.getLogger("kubernetes_asyncio").addHandler(logging.NullHandler())


if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration


T = TypeVar("T", bound=Thing)

# Requests the objects with these query parameters, passed as the client's keywords. May raise a
# DiscoveryError.
Ask = Callable[..., Awaitable[aiohttp.ClientResponse]]

# Follows the pods of a selector, each with engines on these ports.
Follow = Callable[[str, tuple[int, ...], SourceReport], Coroutine[Any, Any, None]]

_POOLS = ("inference.networking.k8s.io", "v1", "inferencepools")

# Most notes about pods; they are shown with every worker.
MAX_NOTES = 5


class KubernetesPods:
    """Follows the pods that the configuration selects.

    Raises:
        ExtraError: the extra is not installed.
    """

    name = "kubernetes"

    def __init__(self, options: Kubernetes, config: Config) -> None:
        with importing_extra("discovery.kubernetes", "kubernetes"):
            import kubernetes_asyncio  # noqa: F401 - an extra
        self._options = options
        self._config = config
        self._access = ApiAccess(options.kubeconfig)

    async def run(self, report: SourceReport) -> None:
        """Follows the pods, and the pool if one is configured, until it is cancelled."""
        from kubernetes_asyncio import client

        access = self._access
        try:
            configuration = await access.reach()
        except DiscoveryError as error:
            report.fault(str(error))
            return
        namespace = self._options.namespace
        if namespace is None:
            namespace = await asyncio.to_thread(own_namespace)
        async with client.ApiClient(configuration) as api:
            list_pods: Any = client.CoreV1Api(
                api
            ).list_namespaced_pod  # its type knows no raw answer
            pods = access.asking(functools.partial(list_pods, namespace, _preload_content=False))
            if self._options.inference_pool is None:
                await self._follow(pods, self._options.selector or "", (), report)
                return
            pools = functools.partial(
                client.CustomObjectsApi(api).list_namespaced_custom_object,
                *_POOLS[:2],
                namespace,
                _POOLS[2],
                field_selector=f"metadata.name={self._options.inference_pool}",
                _preload_content=False,
            )
            follow = functools.partial(self._follow, pods)
            parts = PartReports(report)
            ask, asked = access.asking(pools), parts.part_report("asking for the pool")
            async with asyncio.TaskGroup() as group:
                pool = _Pool(self._options.inference_pool, follow, group, parts)
                await ListWatch(ask, Pool, pool.take, asked, random.random).run()

    async def _follow(
        self, pods: Ask, selector: str, ports: tuple[int, ...], report: SourceReport
    ) -> None:
        engines = Engines(PodSettings(self._options.worker, self._config.models, ports))

        def changed(now: Mapping[str, Pod]) -> None:
            view, notes = engines.read_all(now.values())
            report.view(view, _first_of(notes))

        ask = functools.partial(pods, label_selector=selector)
        await ListWatch(ask, Pod, changed, report, random.random).run()


class _Pool:
    """Follows the pods that the pool selects; while it is missing or invalid, the last ones."""

    def __init__(
        self, name: str, follow: Follow, group: asyncio.TaskGroup, parts: PartReports
    ) -> None:
        self._name = name
        self._follow = follow
        self._group = group
        self._itself = parts.part_report("the pool")
        self._pods = parts.viewing("pods")
        self._spec: PoolSpec | None = None
        self._following: asyncio.Task[None] | None = None

    def take(self, pools: Mapping[str, Pool]) -> None:
        """Applies the current pools of this name, by uid."""
        pool = next((one for one in pools.values() if one.metadata.name == self._name), None)
        fault = _fault_of(pool)
        if pool is None or fault:
            self._itself.fault(f"InferencePool {self._name} {fault}")
            return
        self._itself.confirm()
        if pool.spec != self._spec:
            self._spec = pool.spec
            self._begin(pool.spec)

    def _begin(self, spec: PoolSpec) -> None:
        if self._following is not None:
            self._following.cancel()
            self._pods.confirm()
        labels = spec.selector.match_labels
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        ports = tuple(port.number for port in spec.target_ports)
        self._following = self._group.create_task(self._follow(selector, ports, self._pods))


def _fault_of(pool: Pool | None) -> str:
    if pool is None:
        return "does not exist"
    if not pool.spec.selector.match_labels:
        return "selects every pod"
    ports = [port.number for port in pool.spec.target_ports]
    if not 0 < len(ports) <= MAX_PORTS or not all(0 < port <= MAX_PORT for port in ports):
        return f"does not have 1 to {MAX_PORTS} ports"
    return ""


def _first_of(notes: Sequence[str]) -> str:
    more = [f"and {len(notes) - MAX_NOTES} more"] if len(notes) > MAX_NOTES else []
    return "; ".join([*notes[:MAX_NOTES], *more])


MAX_THINGS = 10_000

# Most pages of a list, and the objects that are read before other tasks run.
MAX_PAGES = 200
AT_ONCE = 20

# etcd keeps no object above 1.5 MiB by default; a page of ordinary pods is a few megabytes.
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_PAGE_BYTES = 32 * 1024 * 1024

# The server ends a watch after WATCH_SECONDS, and counts as hung after PATIENCE_SECONDS more. A
# longer watch would be silent for up to a minute between bookmarks, and a hung server would be
# noticed only then. A bookmark precedes the end, so that the next watch begins at a recent version.
WATCH_SECONDS = 10
PATIENCE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
LIST_SECONDS = 60.0
LIST_SILENCE_SECONDS = 15.0

# If the version is gone, the server says so at once: a watch that is quiet for this long shows that
# the copy is current.
QUIET_SECONDS = 1.0

# Pauses while the server does not answer or refuses. They stay short, since only the next try shows
# that it is back.
FIRST_WAIT_SECONDS = 0.5
LAST_WAIT_SECONDS = 4.0

# A list costs the server far more than a watch. After a list that did not help, because its version
# was gone within this time or it was too long, the pauses grow up to LAST_LIST_WAIT_SECONDS.
LIST_HELPS_SECONDS = 10.0
LAST_LIST_WAIT_SECONDS = 30.0
_OK, _GONE = 200, 410


class _RefusedError(Exception):
    """The server's answer is not what was requested."""


class _UselessListError(_RefusedError):
    """The list cannot be used, and the next one probably cannot either."""


class _GoneError(Exception):
    """The requested version is too old."""


class ListWatch(Generic[T]):
    """Keeps a copy of all objects of one kind.

    ask: lists or watches them. changed: called with the whole copy, by uid, after each change.
    chance: returns 0 to 1, for jitter.
    """

    def __init__(
        self,
        ask: Ask,
        kind: type[T],
        changed: Callable[[Mapping[str, T]], None],
        report: SourceReport,
        chance: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._kind = kind
        self._changed = changed
        self._report = report
        self._backoff = Backoff(FIRST_WAIT_SECONDS, LAST_WAIT_SECONDS, chance)
        self._list_backoff = Backoff(FIRST_WAIT_SECONDS, LAST_LIST_WAIT_SECONDS, chance)
        self._things: dict[str, T] = {}
        self._version = ""
        self._listed_at = 0.0

    async def run(self) -> None:
        """Keeps the copy current until it is cancelled."""
        while True:
            if pause := await self._go_on():
                await asyncio.sleep(pause)

    async def _go_on(self) -> float:
        """Lists if necessary, and watches until the watch ends; returns the pause in seconds."""
        try:
            if not self._version:
                await self._list()
            began = time.monotonic()
            await self._watch()
        except _GoneError:
            return self._pause_before_list()
        except _UselessListError as error:
            self._report.fault(str(error))
            return self._list_backoff.next_seconds()
        except (_RefusedError, DiscoveryError) as error:
            self._report.fault(str(error))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._report.fault(f"the API server does not answer: {_words(error)}")
        else:
            if time.monotonic() - began >= QUIET_SECONDS:
                self._confirm()
                return 0.0
        # also after a watch that ended at once: a server must not be asked in a tight loop
        return self._backoff.next_seconds()

    def _pause_before_list(self) -> float:
        """Returns the pause in seconds: 0, or a growing one if the last list did not help."""
        self._version = ""
        if time.monotonic() - self._listed_at < LIST_HELPS_SECONDS:
            return self._list_backoff.next_seconds()
        self._list_backoff.reset()
        return 0.0

    def _confirm(self) -> None:
        """Reports that the copy is current."""
        self._backoff.reset()
        self._report.confirm()

    async def _list(self) -> None:
        things: dict[str, T] = {}
        timeout = _timeout(LIST_SECONDS, LIST_SILENCE_SECONDS)
        options: dict[str, Any] = {"limit": PAGE, "_request_timeout": timeout}
        for _ in range(MAX_PAGES):
            async with await self._ask(**options) as response:
                await _check(response)
                page = read_listing(await _bounded(response, MAX_PAGE_BYTES))
            if page is None or not (page.metadata.resource_version or page.metadata.continues):
                raise _RefusedError("the API server's answer is no list")
            for number, raw in enumerate(page.items or ()):
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)
                self._put(things, raw)
            if not page.metadata.continues:
                break
            options["_continue"] = page.metadata.continues
        else:
            raise _UselessListError(f"a list has more than {MAX_PAGES} pages")
        self._things, self._version = things, page.metadata.resource_version
        self._listed_at = time.monotonic()
        self._tell()

    async def _watch(self) -> None:
        options: dict[str, Any] = {
            "watch": True,
            "resource_version": self._version,
            "allow_watch_bookmarks": True,
            "timeout_seconds": WATCH_SECONDS,
            "_request_timeout": _timeout(WATCH_SECONDS + PATIENCE_SECONDS, None),
        }
        async with await self._ask(**options) as response:
            await _check(response)
            when_quiet = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._confirm)
            try:
                await self._take_all(response)
            finally:
                when_quiet.cancel()

    async def _take_all(self, response: aiohttp.ClientResponse) -> None:
        rest = b""
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise _RefusedError(f"an event has more than {MAX_LINE_BYTES} bytes")
            if sum([self._take(line) for line in lines if line.strip()]):
                self._tell()

    def _take(self, line: bytes) -> bool:
        """Applies one event; returns whether the copy changed."""
        event = read_event(line)
        if event is None:
            raise _RefusedError("the API server sent something that is no event")
        if event.type == "ERROR":
            refusal = read_refusal(event.object)
            if refusal.code == _GONE:
                raise _GoneError
            raise _RefusedError(f"the API server: {refusal.reason or refusal.code}")
        self._version = read_version(event.object) or self._version
        self._confirm()
        return event.type != "BOOKMARK" and self._apply(event)

    def _apply(self, event: WatchEvent) -> bool:
        if event.type != "DELETED":
            return self._put(self._things, event.object)
        gone = read_thing(event.object, Thing)
        return gone is not None and self._things.pop(gone.metadata.uid, None) is not None

    def _put(self, things: dict[str, T], raw: msgspec.Raw) -> bool:
        """Adds or replaces an object; returns False for one that cannot be read, which is skipped.

        Raises:
            _UselessListError: there are more than `MAX_THINGS`.
        """
        thing = read_thing(raw, self._kind)
        if thing is None:
            return False
        uid = thing.metadata.uid
        if uid not in things and len(things) >= MAX_THINGS:
            self._version = ""  # list again, so that a skipped object is not missed
            raise _UselessListError(f"there are more than {MAX_THINGS} objects")
        things[uid] = thing
        return True

    def _tell(self) -> None:
        self._changed(self._things)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == _OK:
        return
    if response.status == _GONE:
        raise _GoneError
    refusal = read_refusal(await _bounded(response, MAX_LINE_BYTES))
    raise _RefusedError(f"the API server: {response.status} {refusal.message[:200]}".rstrip())


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise _RefusedError(f"the API server's answer has more than {limit} bytes")
    return bytes(body)


def _timeout(total_seconds: float, silence_seconds: float | None) -> aiohttp.ClientTimeout:
    """Returns the time limits of a request: as a whole, and between two pieces of its answer."""
    return aiohttp.ClientTimeout(
        total=total_seconds, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds
    )


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it said nothing in time"
    return " ".join(str(error).split())[:200] or type(error).__name__


_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

# A credential is renewed this long before it expires.
EARLY = dt.timedelta(seconds=60)

# How long to wait for the kubeconfig's command.
COMMAND_SECONDS = 60.0

_UNAUTHORIZED = 401

# What a kubeconfig contains: how to reach the server, and when the credential expires, if known.
_Read: TypeAlias = "tuple[Configuration, dt.datetime | None]"


class ApiAccess:
    """How to reach one API server, and with which credentials.

    kubeconfig: the name of a file; None for the service account of our own pod.
    """

    def __init__(self, kubeconfig: str | None) -> None:
        self._kubeconfig = kubeconfig
        self._expires_at: dt.datetime | None = None
        self._refused: str | None = None
        self._renewing = asyncio.Lock()
        self._reading: asyncio.Task[_Read] | None = None

    async def reach(self) -> "Configuration":
        """Returns the configuration of a client; its credentials are renewed as they expire.

        Raises:
            DiscoveryError: it cannot be loaded.
        """
        from kubernetes_asyncio import client, config

        if self._kubeconfig is not None:
            configuration = await self._load()
            configuration.refresh_api_key_hook = self._renew_if_due
            return configuration
        configuration = client.Configuration()
        try:
            config.load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        except Exception as error:
            raise _not_known(error) from error
        return configuration

    def asking(self, ask: Ask) -> Ask:
        """Returns `ask` as a function that, if refused, asks once more with a new credential."""

        async def ask_as_known(**options: Any) -> aiohttp.ClientResponse:
            response = await ask(**options)
            if response.status != _UNAUTHORIZED or self._kubeconfig is None:
                return response
            self._refused = response.request_info.headers.get("Authorization")
            response.close()
            return await ask(**options)

        return ask_as_known

    async def _renew_if_due(self, configuration: "Configuration") -> None:
        """Renews the token if that is due; the client calls this before each request."""
        async with self._renewing:
            now = dt.datetime.now(dt.UTC)
            is_over = self._expires_at is not None and now >= self._expires_at - EARLY
            if is_over or configuration.api_key["BearerToken"] == self._refused:
                await self._renew(configuration)

    async def _renew(self, configuration: "Configuration") -> None:
        configuration.api_key = (await self._load()).api_key
        self._refused = None

    async def _load(self) -> "Configuration":
        """Returns the kubeconfig's current configuration.

        Its command cannot be stopped from here, so while one hangs, no other is started.

        Raises:
            DiscoveryError: it cannot be loaded, or its command takes longer than COMMAND_SECONDS.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(_read(self._kubeconfig))
        done, _ = await asyncio.wait((self._reading,), timeout=COMMAND_SECONDS)
        if not done:
            raise _not_known(f"its command takes longer than {COMMAND_SECONDS:g} s")
        self._reading = None
        try:
            configuration, self._expires_at = done.pop().result()
        except Exception as error:  # the loaders raise all kinds of exceptions
            raise _not_known(error) from error
        return configuration


async def _read(kubeconfig: str | None) -> _Read:
    from kubernetes_asyncio import client, config

    configuration = client.Configuration()
    loader = await config.load_kube_config(
        config_file=kubeconfig, client_configuration=configuration
    )
    return configuration, getattr(loader, "exec_plugin_expiry", None)


def _not_known(reason: object) -> DiscoveryError:
    words = " ".join(str(reason).split())[:200]
    return DiscoveryError(f"the API server is not known: {words}")


def own_namespace() -> str:
    """Returns the namespace of our own pod, or `default`."""
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return "default"
