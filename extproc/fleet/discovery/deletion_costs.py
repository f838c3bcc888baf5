"""Tells Kubernetes which pod is missed least: the one whose cache saved the fewest tokens lately.

A ReplicaSet that is scaled down deletes the pods with the lowest annotation
`controller.kubernetes.io/pod-deletion-cost` first, an integer of 32 bits
(https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost). It is not
to be changed often, so a cost is the logarithm of the tokens, and is written only if that has
changed by a half.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from math import log2
from typing import Any

from extproc.base.errors import DiscoveryError
from extproc.config.schema import Kubernetes
from extproc.fleet.discovery.api_access import ApiAccess
from extproc.fleet.discovery.kubernetes import own_namespace

log = logging.getLogger("kvsteer.discovery")

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
INTERVAL_SECONDS = 300.0
REQUEST_SECONDS = 10.0

# Points for each doubling of the tokens, and the least change that is written.
POINTS, LEAST_CHANGE = 10, 5

_OK = 200
_MERGE_PATCH = "application/merge-patch+json"


def cost_of(tokens: int) -> int:
    """Returns the deletion cost of a pod whose cache saved so many tokens."""
    return round(POINTS * log2(1 + tokens))


def due_costs(saved: Iterable[tuple[str, int]], written: Mapping[str, int]) -> dict[str, int]:
    """Returns the costs that have to be written, by the pod's name.

    saved: a pod and the tokens that a worker in it saved; a pod may have several. written: the
    costs that were written last.
    """
    tokens: dict[str, int] = {}
    for pod, count in saved:
        tokens[pod] = tokens.get(pod, 0) + count
    costs = {pod: cost_of(count) for pod, count in tokens.items()}
    return {
        pod: cost
        for pod, cost in costs.items()
        if pod not in written or abs(cost - written[pod]) >= LEAST_CHANGE
    }


class DeletionCosts:
    """Writes the costs of the pods.

    saved: yields the pod of each worker, and how many tokens its cache saved lately.
    """

    def __init__(
        self,
        options: Kubernetes,
        saved: Callable[[], Iterable[tuple[str, int]]],
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._namespace = options.namespace
        self._saved = saved
        self._interval_seconds = interval_seconds
        self._access = ApiAccess(options.kubeconfig)
        self._written: dict[str, int] = {}
        self._is_failing = False

    async def run(self) -> None:
        """Writes the costs that have changed, every few minutes, until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            try:
                await self.write()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next turn may succeed
                self._fail(f"{type(error).__name__}: {error}")

    async def write(self) -> None:
        """Writes the costs that have changed.

        Raises:
            DiscoveryError: the API server is not known, or refuses a cost.
        """
        from kubernetes_asyncio import client

        saved = list(self._saved())
        due = due_costs(saved, self._written)
        if not due:
            return
        configuration = await self._access.reach()
        namespace = self._namespace or await asyncio.to_thread(own_namespace)
        async with client.ApiClient(configuration) as api:
            patch: Any = client.CoreV1Api(api).patch_namespaced_pod
            for pod, cost in due.items():
                body = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
                ask = functools.partial(
                    patch,
                    pod,
                    namespace,
                    body,
                    _content_type=_MERGE_PATCH,
                    _preload_content=False,
                    _request_timeout=REQUEST_SECONDS,
                )
                response = await self._access.asking(ask)()
                response.close()
                if response.status != _OK:
                    raise DiscoveryError(f"pod {pod}: status {response.status}")
                self._written[pod] = cost
        current = {pod for pod, _ in saved}
        self._written = {pod: cost for pod, cost in self._written.items() if pod in current}
        self._is_failing = False

    def _fail(self, reason: str) -> None:
        """Logs a failure, once until a turn succeeds."""
        if not self._is_failing:
            log.warning("deletion costs of pods cannot be written: %.300s", reason)
        self._is_failing = True
