"""The legs of requests, as a feature: tells the proxy and the engines who else takes part.

Which workers these are, `extproc.disaggregation` decides.
"""

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
from extproc.features.feature import NOTHING_WRITTEN, Feature, Written
from extproc.features.router_parts import RouterParts
from extproc.requests.added_fields import Body
from extproc.requests.refusals import Refusal, refused_body
from extproc.routing.decision import Decision

# Size of a room: SGLang accepts positive numbers of 64 bits.
ROOM_BITS = 63


class Legs(Feature):
    """Writes the headers and bodies that announce the legs of a router's requests.

    bits: returns an unpredictable number of this many random bits.
    """

    def __init__(self, config: Config, bits: Callable[[int], int] = secrets.randbits) -> None:
        self._rules = config.disaggregation
        self._changes_bodies = self._rules.changes_bodies
        clusters = cluster_names(model.name for model in config.models)
        self._clusters = {model: prefill_cluster(name) for model, name in clusters.items()}
        self._bits = bits

    def write(self, decision: Decision, path: str, body: Body | None) -> Written | Refusal:
        """Returns the headers and the body to send.

        Refuses a request whose prompt another worker is to compute, but whose body is no object.

        body: without a client's own such fields; None if it must not be changed.
        """
        if not self._changes_bodies:
            return Written(self._to_sidecar(decision))
        fields = None if body is None else self._transfer(decision, path)
        if body is None or fields is None:
            return NOTHING_WRITTEN
        handing = decision.handing
        changed = edited(body, fields, None if handing is None else handing.tokens)
        if changed is None:
            return NOTHING_WRITTEN if decision.prefill is None else refused_body(path)
        return Written(self._headers(decision, changed.tail), changed.body)

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


def legs(config: Config, _: RouterParts) -> Legs | None:
    """Returns the feature if other workers may have a part in requests."""
    rules = config.disaggregation
    return Legs(config) if rules.mode is not None or rules.changes_bodies else None
