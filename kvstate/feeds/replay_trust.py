"""Whether the replays that a feed asks for are those of the publisher that it hears."""

from collections import OrderedDict

from kvstate.events import Batch

# Restarts over one connection, without a replay that contains the batches received live, after
# which replays are ignored.
MAX_RESTARTS_IN_A_ROW = 3
# The last batches of the live stream; replays are compared with them.
MAX_HEARD = 64


class ReplayTrust:
    """Compares replays with the live stream of one connection.

    A publisher that restarted without losing its connection replays the batches received since. If
    one seems to restart again and again, and its replays never contain the batches received live,
    there are two publishers: the replay endpoint is another worker's.
    """

    def __init__(self) -> None:
        self._live_stamps: OrderedDict[int, float] = OrderedDict()
        self._restarts_in_a_row = 0
        self._was_answered = False  # since the last restart

    @property
    def is_lost(self) -> bool:
        """Whether replays are ignored, until the next connection."""
        return self._restarts_in_a_row >= MAX_RESTARTS_IN_A_ROW

    def begin(self) -> None:
        """Begins again, with a new connection."""
        self._live_stamps.clear()
        self._restarts_in_a_row, self._was_answered = 0, False

    def note_live(self, batch: Batch) -> None:
        """Notes a batch of the live stream."""
        self._live_stamps[batch.sequence] = batch.stamp
        if len(self._live_stamps) > MAX_HEARD:
            self._live_stamps.popitem(last=False)

    def note_replayed(self, batch: Batch) -> None:
        """Notes a batch of a replay; one that was received live proves that they agree."""
        self._was_answered = True
        if self._live_stamps.get(batch.sequence) == batch.stamp:
            self._restarts_in_a_row = 0

    def note_answer(self) -> None:
        """Notes that a replay was answered to its end."""
        self._was_answered = True

    def note_restart(self) -> None:
        """Notes that the publisher seems to have restarted."""
        self._live_stamps.clear()
        self._restarts_in_a_row += self._was_answered
        self._was_answered = False
