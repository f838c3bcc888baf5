"""Pods of a Kubernetes cluster that are workers: by a label selector, or those of an InferencePool.

Needs the extra `kubernetes`, which knows kubeconfigs, service accounts and their tokens; lists and
watches are read here.
"""

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from extproc.address import MAX_PORT
from extproc.config import Config, Kubernetes
from extproc.discovery.kubernetes_wire import Pod, Pool, PoolSpec
from extproc.discovery.list_watch import Ask, ListWatch
from extproc.discovery.pod_words import MAX_PORTS
from extproc.discovery.pods import Asked, Engines
from extproc.discovery.sources import Report
from extproc.discovery.view import View
from extproc.errors import StartError

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
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

    async def run(self, report: Report) -> None:
        """Follows pods, and the pool if there is one, until it is cancelled."""
        from kubernetes_asyncio import client  # noqa: PLC0415 - an extra

        try:
            configuration, namespace = await self._reach()
        except Exception as error:  # noqa: BLE001 - the loaders raise what they like
            report.fault(f"the API server is not known: {' '.join(str(error).split())[:200]}")
            return
        async with client.ApiClient(configuration) as api:
            list_pods: Any = client.CoreV1Api(
                api
            ).list_namespaced_pod  # its type knows no raw answer
            pods: Ask = functools.partial(list_pods, namespace, _preload_content=False)
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
            async with asyncio.TaskGroup() as group:
                pool = _Pool(self._options.inference_pool, follow, group, report)
                quiet = report._replace(confirm=lambda: None)  # the pods are what is confirmed
                await ListWatch(pools, Pool, pool.take, quiet, random.random).run()

    async def _follow(
        self, pods: Ask, selector: str, ports: tuple[int, ...], report: Report
    ) -> None:
        engines = Engines(Asked(self._options.worker, self._config.models, ports))

        def changed(now: Mapping[str, Pod]) -> None:
            view, notes = engines.of(now.values())
            report.view(view, _first_of(notes))

        ask = functools.partial(pods, label_selector=selector)
        await ListWatch(ask, Pod, changed, report, random.random).run()

    async def _reach(self) -> tuple[Any, str]:
        """How the API server is reached, and which namespace is meant."""
        from kubernetes_asyncio import client, config  # noqa: PLC0415 - an extra

        configuration = client.Configuration()
        if self._options.kubeconfig is not None:
            await config.load_kube_config(
                config_file=self._options.kubeconfig, client_configuration=configuration
            )
        else:
            config.load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        namespace = self._options.namespace
        if namespace is None:
            namespace = await asyncio.to_thread(_own_namespace)
        return configuration, namespace


class _Pool:
    """Follows the pods of the pool as it is now; while there is none, those that it had."""

    def __init__(self, name: str, follow: Follow, group: asyncio.TaskGroup, report: Report) -> None:
        self._name = name
        self._follow = follow
        self._group = group
        self._report = report
        self._spec: PoolSpec | None = None
        self._fault = ""
        self._following: asyncio.Task[None] | None = None

    def take(self, pools: Mapping[str, Pool]) -> None:
        """Takes the pools of this name as they are now."""
        pool = next((one for one in pools.values() if one.metadata.name == self._name), None)
        self._fault = _fault_of(pool)
        if pool is None or self._fault:
            self._fault = f"InferencePool {self._name} {self._fault}"
            self._report.fault(self._fault)
        elif pool.spec == self._spec:
            self._report.confirm()
        else:
            self._spec = pool.spec
            self._begin(pool.spec)

    def _begin(self, spec: PoolSpec) -> None:
        if self._following is not None:
            self._following.cancel()
        labels = spec.selector.match_labels
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        ports = tuple(port.number for port in spec.target_ports)
        report = self._report._replace(confirm=self._confirm, view=self._view)
        self._following = self._group.create_task(self._follow(selector, ports, report))

    def _confirm(self) -> None:
        if not self._fault:
            self._report.confirm()

    def _view(self, view: View, note: str) -> None:
        self._report.view(view, note)
        if self._fault:
            self._report.fault(self._fault)


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


def _own_namespace() -> str:
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return "default"
