"""How a proxy, a sidecar and the engines are told of the worker that computes a prompt."""

import secrets
from collections.abc import Callable

from extproc import headers
from extproc.config.schema import Config
from extproc.endpoint_files import cluster_names, prefill_cluster
from extproc.picking.decision import Decision, Refusal, refused_body
from extproc.requests.request import Ask
from extproc.requests.transfer_fields import Transfer, edited, may_hide, pulled, transfer

# Of a room: SGLang takes positive numbers of 64 bits.
ROOM_BITS = 63

# The headers that are set, and the body that replaces the client's, None if it stays.
Said = tuple[tuple[tuple[str, str], ...], bytes | None]
_NOTHING: Said = ((), None)


class Legs:
    """What requests of one router say.

    headers: those that no client may set. bits: draws so many random bits, which nobody can guess.
    """

    def __init__(self, config: Config, bits: Callable[[int], int] = secrets.randbits) -> None:
        self._rules = config.disaggregation
        self._changes_bodies = self._rules.changes_bodies
        self.headers: tuple[str, ...] = headers.OF_LEGS.get(self._rules.mode or "", ())
        clusters = cluster_names(model.name for model in config.models)
        self._clusters = {model: prefill_cluster(name) for model, name in clusters.items()}
        self._bits = bits

    def of(self, decision: Decision, ask: Ask) -> Said | Refusal:
        """Returns what a request says, or why it is refused."""
        if not self._changes_bodies:
            return self._to_sidecar(decision), None
        if ask.body is None or ask.wants_endpoint:
            return _NOTHING
        changed = edited(ask.body, self._transfer(decision, ask))
        if changed is None:
            is_harmless = decision.prefill is None and not may_hide(ask.body)
            return _NOTHING if is_harmless else refused_body()
        body = None if changed.body is ask.body else changed.body
        return self._headers(decision, changed.tail), body

    def _to_sidecar(self, decision: Decision) -> tuple[tuple[str, str], ...]:
        prefill, source = decision.prefill, decision.source
        if prefill is not None:
            return ((headers.PREFILLER, prefill.pick[0]),)
        return () if source is None else ((headers.KV_SOURCE, source.endpoint),)

    def _transfer(self, decision: Decision, ask: Ask) -> Transfer | None:
        prefill, source = decision.prefill, decision.source
        if source is not None:
            return pulled(source.endpoint, source.port, self._bits(ROOM_BITS))
        if prefill is None:
            return None
        names = [worker.name for worker in prefill.workers]
        port = prefill.workers[names.index(prefill.worker)].transfer_port
        rooms = [self._bits(ROOM_BITS) for _ in range(max(1, len(prefill.marks)))]
        return transfer(
            *(self._rules.connector, prefill.pick[0], port or self._rules.transfer_port),
            *(ask.head.path, rooms),
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
