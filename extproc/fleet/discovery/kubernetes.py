"""Workers among the pods of a Kubernetes cluster: those of a label selector or an InferencePool.

Needs the extra `kubernetes`, whose client knows kubeconfigs, service accounts and credential
plugins.
"""

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from extproc.base.address import MAX_PORT
from extproc.base.errors import DiscoveryError, importing_extra
from extproc.config.schema import Config, Kubernetes
from extproc.fleet.discovery.api_access import ApiAccess
from extproc.fleet.discovery.list_watch import USUAL, Ask, ListWatch, WatchLimits
from extproc.fleet.discovery.pods import MAX_PORTS, Engines, Pod, PodSettings, Pool, PoolSpec
from extproc.fleet.discovery.view import PartReports, SourceReport

# The client's own log of failures is off: this source reports them as faults.
logging.getLogger("kubernetes_asyncio").addHandler(logging.NullHandler())

# Follows the pods of a selector, each with engines on these ports.
Follow = Callable[[str, tuple[int, ...], SourceReport], Coroutine[Any, Any, None]]

_POOLS = ("inference.networking.k8s.io", "v1", "inferencepools")

# Most notes about pods; they are shown with every worker.
MAX_NOTES = 5


class KubernetesPods:
    """Follows the pods that the configuration selects.

    access: how the API server is reached.

    Raises:
        ExtraError: the extra is not installed.
    """

    name = "kubernetes"

    def __init__(self, options: Kubernetes, config: Config, limits: WatchLimits = USUAL) -> None:
        with importing_extra("discovery.kubernetes", "kubernetes"):
            import kubernetes_asyncio  # noqa: F401 - an extra
        self._options = options
        self._config = config
        self._limits = limits
        self.access = ApiAccess(options.kubeconfig)

    async def run(self, report: SourceReport) -> None:
        """Follows the pods, and the pool if one is configured, until it is cancelled."""
        from kubernetes_asyncio import client

        access = self.access
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
                watch = ListWatch(ask, Pool, pool.take, asked, random.random, self._limits)
                await watch.run()

    async def _follow(
        self, pods: Ask, selector: str, ports: tuple[int, ...], report: SourceReport
    ) -> None:
        engines = Engines(PodSettings(self._options.worker, self._config.models, ports))

        def changed(now: Mapping[str, Pod]) -> None:
            view, notes = engines.read_all(now.values())
            report.view(view, _first_of(notes))

        ask = functools.partial(pods, label_selector=selector)
        await ListWatch(ask, Pod, changed, report, random.random, self._limits).run()


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


_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def own_namespace() -> str:
    """Returns the namespace of our own pod, or `default`."""
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return "default"
