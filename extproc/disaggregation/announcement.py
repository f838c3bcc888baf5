"""Announces a request's legs to the proxy and the engines: legs in, headers and body out."""

import secrets
from collections.abc import Callable

from extproc.base import headers
from extproc.config.schema import Config
from extproc.disaggregation.transfer_fields import (
    Transfer,
    edited,
    pulled,
    transfer,
)
from extproc.envoy.endpoint_files import cluster_names, prefill_cluster
from extproc.requests.added_fields import Body
from extproc.routing.decision import Decision

# Size of a room: SGLang accepts positive numbers of 64 bits.
ROOM_BITS = 63

# The headers to set, and the body that replaces the client's, None if it stays.
Said = tuple[tuple[tuple[str, str], ...], Body | None]
_NOTHING_SAID: Said = ((), None)


class Announcer:
    """Writes the headers and bodies that announce the legs of a router's requests.

    bits: returns an unpredictable number of this many random bits.
    """

    def __init__(self, config: Config, bits: Callable[[int], int] = secrets.randbits) -> None:
        self._rules = config.disaggregation
        self._changes_bodies = self._rules.changes_bodies
        clusters = cluster_names(model.name for model in config.models)
        self._clusters = {model: prefill_cluster(name) for model, name in clusters.items()}
        self._bits = bits

    def announce(self, decision: Decision, path: str, body: Body | None) -> Said | None:
        """Returns the headers and the body to send; None if the request must be refused.

        body: without a client's own such fields; None if it must not be changed.
        """
        if not self._changes_bodies:
            return self._to_sidecar(decision), None
        fields = None if body is None else self._transfer(decision, path)
        if body is None or fields is None:
            return _NOTHING_SAID
        changed = edited(body, fields)
        if changed is None:
            return _NOTHING_SAID if decision.prefill is None else None
        return self._headers(decision, changed.tail), changed.body

    def _to_sidecar(self, decision: Decision) -> tuple[tuple[str, str], ...]:
        prefill, source = decision.prefill, decision.source
        if prefill is not None:
            return ((headers.PREFILLER, prefill.pick[0]),)
        return () if source is None else ((headers.KV_SOURCE, source.endpoint),)

    def _transfer(self, decision: Decision, path: str) -> Transfer | None:
        prefill, source = decision.prefill, decision.source
        if source is not None:
            return pulled(source.endpoint, source.port, self._bits(ROOM_BITS))
        if prefill is None:
            return None
        names = [worker.name for worker in prefill.basis.workers]
        port = prefill.basis.workers[names.index(prefill.worker)].transfer_port
        rooms = [self._bits(ROOM_BITS) for _ in range(max(1, len(prefill.marks)))]
        return transfer(
            self._rules.connector,
            prefill.pick[0],
            port or self._rules.transfer_port,
            path,
            rooms,
        )

    def _headers(self, decision: Decision, tail: str) -> tuple[tuple[str, str], ...]:
        prefill = decision.prefill
        if prefill is None or decision.model is None:
            return ()
        said = (
            (headers.PREFILLER, prefill.pick[0]),
            (headers.PREFILL_CLUSTER, self._clusters[decision.model]),
        )
        return (*said, (headers.PREFILL_TAIL, tail)) if tail else said
