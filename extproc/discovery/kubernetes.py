"""Pods of a Kubernetes cluster that are workers: by a label selector, or those of an InferencePool.

Needs the extra `kubernetes`, which knows kubeconfigs, service accounts and their tokens; lists and
watches are read here.
"""

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from extproc.address import MAX_PORT
from extproc.config import Config, Kubernetes
from extproc.discovery.api_access import ApiAccess, own_namespace
from extproc.discovery.kubernetes_wire import Pod, Pool, PoolSpec
from extproc.discovery.list_watch import Ask, ListWatch
from extproc.discovery.part_reports import PartReports
from extproc.discovery.pod_words import MAX_PORTS
from extproc.discovery.pods import Asked, Engines
from extproc.discovery.sources import Report
from extproc.errors import DiscoveryError, StartError

_POOLS = ("inference.networking.k8s.io", "v1", "inferencepools")
_NEEDED = "discovery.kubernetes: needs the extra: pip install 'kvsteer[kubernetes]'"

# Of what is wrong with pods so much is told; it is shown with every worker.
MAX_NOTES = 5

# The pods of a selector, each with engines on these ports.
Follow = Callable[[str, tuple[int, ...], Report], Coroutine[Any, Any, None]]


class KubernetesPods:
    """Follows the pods.

    Raises:
        StartError: the extra is not installed.
    """

    name = "kubernetes"

    def __init__(self, options: Kubernetes, config: Config) -> None:
        try:
            import kubernetes_asyncio  # noqa: F401, PLC0415 - an extra
        except ImportError:
            raise StartError(_NEEDED) from None
        self._options = options
        self._config = config
        self._access = ApiAccess(options.kubeconfig)

    async def run(self, report: Report) -> None:
        """Follows pods, and the pool if there is one, until it is cancelled."""
        from kubernetes_asyncio import client  # noqa: PLC0415 - an extra

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
                *(*_POOLS[:2], namespace, _POOLS[2]),
                field_selector=f"metadata.name={self._options.inference_pool}",
                _preload_content=False,
            )
            follow = functools.partial(self._follow, pods)
            parts = PartReports(report)
            ask, asked = access.asking(pools), parts.aside("asking for the pool")
            async with asyncio.TaskGroup() as group:
                pool = _Pool(self._options.inference_pool, follow, group, parts)
                await ListWatch(ask, Pool, pool.take, asked, random.random).run()

    async def _follow(
        self, pods: Ask, selector: str, ports: tuple[int, ...], report: Report
    ) -> None:
        engines = Engines(Asked(self._options.worker, self._config.models, ports))

        def changed(now: Mapping[str, Pod]) -> None:
            view, notes = engines.of(now.values())
            report.view(view, _first_of(notes))

        ask = functools.partial(pods, label_selector=selector)
        await ListWatch(ask, Pod, changed, report, random.random).run()


class _Pool:
    """Follows the pods of the pool as it is now; while there is none, those that it had."""

    def __init__(
        self, name: str, follow: Follow, group: asyncio.TaskGroup, parts: PartReports
    ) -> None:
        self._name = name
        self._follow = follow
        self._group = group
        self._itself = parts.aside("the pool")
        self._pods = parts.viewing("pods")
        self._spec: PoolSpec | None = None
        self._following: asyncio.Task[None] | None = None

    def take(self, pools: Mapping[str, Pool]) -> None:
        """Takes the pools of this name as they are now."""
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
