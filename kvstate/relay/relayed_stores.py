"""The blocks of stores that workers share, as another process of this host knows them.

What workers do to a store later is in their own batches; this is what they did to it before this
process began to read them.
"""

import logging

from kvstate.errors import DamagedError
from kvstate.relay.holdings import Arriving, putting
from kvstate.relay.records import Kind, Record, StoreBeginning, store_beginning_in
from kvstate.steps import Steps
from kvstate.stores.stores import Stores

log = logging.getLogger("kvsteer.feed")


class RelayedStores:
    """Has the stores of this process hold what those of another one did."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._arriving = Arriving[StoreBeginning]()

    def taking(self, record: Record) -> Steps[None]:
        """Takes a record of a store, in steps.

        Raises:
            DamagedError: it cannot be read.
        """
        match record.kind:
            case Kind.STORE:
                self._arriving.begin(store_beginning_in(record.payload))
            case Kind.STORED:
                yield from self._putting()
            case other if not self._arriving.take(other, record.payload):
                raise DamagedError("a record that no store has")

    def _putting(self) -> Steps[None]:
        beginning, holding = self._arriving.end()
        owner = self._stores.owner(beginning.store, beginning.model)
        if owner is None:
            return  # it is not configured here
        try:
            gate = self._stores.gate(beginning.store)
            yield from gate.passing(putting(owner, beginning.saved, holding))
            self._stores.believe(beginning.store, beginning.model)
        except DamagedError as error:
            log.warning("store %s: what another process knows of it: %s", beginning.store, error)
