"""The compiled core: `kvstate/native/` has its sources, in C."""

from array import array
from collections.abc import Sequence

from kvstate.events import BlockHash
from kvstate.index.core import Outcome, OwnerStatus
from kvstate.overlap import Overlap, Tokens

# Of saved rows: with another one, they are of no use.
LAYOUT: int

class Core:
    """Knows which owner (rank) holds which blocks.

    Engine hashes are unsigned 64-bit ints, as folded by the wire decoders, or bytes.

    secret: 64 random bits of this process, on which block keys depend. A key is a routing hint: a
    collision costs a bad route, not a wrong answer, and no method returns one, so that collisions
    are hard to construct from outside. limit_blocks: the default limit on the blocks of an owner.
    overlap: `Overlap`, so that the core imports nothing.
    """

    def __init__(self, secret: int, limit_blocks: int, overlap: type[Overlap], /) -> None: ...
    def add_model(self, seed: bytes) -> int:
        """Returns the number of a new key space, which its seed separates from all others."""

    def add_owner(self, worker: int, model: int, rank: int) -> int:
        """Returns the number of a new, empty owner; ranks of one worker share `worker`."""

    def limit(self, owner: int, blocks: int) -> None:
        """Limits the blocks that an owner may hold from now on."""

    def remove_owner(self, owner: int) -> None:
        """Frees everything an owner had; its number may be reused."""

    def clear(self, owner: int) -> None:
        """Forgets everything an owner holds."""

    def demote(self, owner: int) -> None:
        """Makes everything an owner holds uncertain."""

    def clear_some(self, owner: int, work: int) -> bool:
        """Goes on with `clear` until the block that reaches this much work; returns whether all is
        done. A block is four table lookups, of which `work` is a number.
        """

    def demote_some(self, owner: int, work: int) -> bool:
        """Goes on with `demote` as `clear_some` does; returns whether all is done.

        Blocks not demoted yet still count as certain, unless the owner is not trusted.
        """

    def trust(self, owner: int, trusted: bool) -> None:
        """Sets whether an owner's certain blocks count as certain; at first they do not."""

    def store(
        self,
        owner: int,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        tokens: Tokens | memoryview,
        block_size: int,
        lora: str | int | None,
        extras: list[bytes | None] | None,
        medium: str,
        group: int | None,
        may_repeat: bool,
    ) -> int:
        """Adds a copy of each block of a chain; returns a `StoreResult`.

        may_repeat: the blocks of it that are held may only be announced again: vLLM does so from
        the root of a prompt on, if a request asks for it. See `remove`.
        """

    def copy(self, owner: int, hashes: list[BlockHash], medium: str, group: int | None) -> None:
        """Adds a copy of each block, as certain as the block found by its hash.

        A block that is not held is counted as copied_unknown.
        """

    def lend(
        self, owner: int, lender: int, hashes: list[BlockHash], medium: str, group: int | None
    ) -> int:
        """Adds a copy of each block that another owner of its model holds, as certain as there.

        Returns how many that are. A block that the lender does not hold is counted as
        copied_unknown.

        Raises:
            ValueError: the owners are of different models.
        """

    def remove(
        self,
        owner: int,
        block: BlockHash,
        medium: str,
        group: int | None,
        left: int | None = None,
    ) -> bool:
        """Drops one copy, a certain one first; returns False if there was none.

        left: how many copies of the block are left on this medium then, None if this is not told.
        Then the owner's removals may be those of each copy, or only of the last one: a hash stored
        twice and removed once may be gone. So what is left of a block after a removal is uncertain
        until it is stored again, or until the rule is known: a hash removed twice, without a store
        or a hole between, shows that the removal of each copy is announced. From then on copies are
        believed, and `expire` makes certain again what only the removals made uncertain. Not so
        for a hash that was stored while it was held by a store that may repeat: what a removal
        leaves of it is uncertain until it is stored again, whatever the rule.
        """

    def admit(self, owner: int, group: int | None, holds_prefix: bool | None) -> int:
        """Notes that blocks of a group were stored; returns an `Admission`.

        holds_prefix: whether its kind of attention holds the whole prefix; None if the event names
            no kind. See `kvstate.wire.extras`.
        """

    def admission(self, owner: int, group: int | None) -> int:
        """Returns how blocks of a group are treated, by the stores so far; an `Admission`."""

    def note_group(self, owner: int, group: int | None, block_size: int, reach: int) -> None:
        """Notes a group that does not hold the whole prefix, as named by a store of it.

        reach: how many tokens before its end a prefix needs in this group; 0 if that is not known.
        An overlap is certain only as far as each of the owner's groups is known to hold what a
        prefix needs: each block of the group that ends within its reach, or all there are.
        """

    def store_ends(
        self, owner: int, hashes: list[BlockHash], group: int | None, may_repeat: bool
    ) -> None:
        """Adds a copy of each block of another group on the device, known by its hash alone.

        A hash links it to the block that ends at the same token, which may be stored later. Blocks
        of groups that were not noted are ignored. may_repeat: as for `store`.
        """

    def remove_end(self, owner: int, block: BlockHash, group: int | None, left: int | None) -> None:
        """Drops one copy of a block of another group; the rules are those of `remove`."""

    def begin_message(self, owner: int) -> None:
        """Begins the next message of typed events; `start` and `apply` do so themselves."""

    def may_reuse(self, owner: int, hashes: list[BlockHash], block_size: int) -> bool:
        """Whether the engine could reuse any part of a prompt that begins with these blocks.

        By what was held before this message. If it could, a store from the prompt's root may only
        announce blocks again; else it computed them anew. True without other groups, and where the
        answer is not known.
        """

    def announce_copies(self, owner: int) -> None:
        """Notes that an engine announces the removal of each copy of a block; see `remove`."""

    def other_groups(self, owner: int) -> tuple[int, bool, tuple[tuple[int, int], ...]]:
        """Returns (hashes with ends, whether all groups can be followed, classes of groups).

        A class is (block size, blocks needed before the end of a prefix).
        """

    def drop_last(self, owner: int, blocks: int) -> None:
        """Sets how many blocks at the end of what it holds an owner's engine computes again."""

    def forget_layout(self, owner: int) -> None:
        """Forgets what was learned of an owner's groups, layouts and media.

        The engine may be another one now.
        """

    def layout(self, owner: int) -> tuple[bool | None, bool | None]:
        """Returns (names_salts, names_loras) as `apply` found them; see `BlocksStored`."""

    def start(self, owner: int, payload: bytes, work: int) -> Outcome | bool:
        """Starts to apply a message, and does at most this much of it.

        Returns True if `proceed` has to do more; False where `apply` would return None. An owner
        has only one message under way; a new one replaces it.
        """

    def proceed(self, owner: int, work: int) -> Outcome | bool:
        """Continues the message that `start` began; returns the same."""

    def abandon(self, owner: int) -> None:
        """Gives up the message under way, if any; what was applied stays."""

    def apply(self, owner: int, payload: bytes) -> Outcome | None:
        """Applies a whole message if its format is as expected.

        It stops before a store whose parent is unknown or whose group is doubtful. Returns None,
        with nothing applied, if anything in the message is unexpected.
        """

    def apply_run(
        self, records: bytes, at: int, owners: array[int], marks: bytearray, work: int
    ) -> tuple[int, Outcome | None]:
        """Applies as many batches as it can, from records that another process passes on.

        records: see `kvstate.relay.records`. owners: by rank, 1 more than the owner's number; 0 for
        ranks to skip, with `SPECIAL` for those whose batches the caller applies. marks: takes
        number and stamp of each rank's last batch. work: it stops after about this much.

        Returns where it stopped: at the end, at an incomplete record, at one for the caller, or at
        one of which it applied something that the caller has to look at; then with the outcome.
        """

    def pass_on(self, owner: int, rank: int, number: int, stamp: float) -> int:
        """Writes down what the last message changed, for `apply_run` of another process.

        The record is one of `kvstate.relay.records`. Returns the length of all records that were
        written down; 0, and writes nothing, unless the message was this owner's, was applied by one
        call, and did nothing but store and remove blocks of groups that hold the whole prefix.
        """

    def passed_on(self) -> bytes:
        """Returns the records that were written down since it was last called."""

    def overlaps(
        self,
        model: int,
        tokens: Tokens | memoryview,
        lora: str | int | None,
        first: bytes | None,
        names: Sequence[str],
    ) -> dict[str, Overlap]:
        """Returns the best overlap of each worker that holds the first block, by worker name.

        What an owner holds is cut to what its engine can reuse, see `note_group` and `drop_last`;
        the rest is unusable. Where blocks are uncertain or on other tiers, ends may be unknown, and
        what they decide is uncertain.

        first: the extra keys of the first block. names: of workers, by number.
        """

    def overlaps_on(
        self,
        model: int,
        tokens: Tokens | memoryview,
        lora: str | int | None,
        first: bytes | None,
        names: Sequence[str],
        tier: int,
    ) -> dict[str, Overlap]:
        """Returns `overlaps` of the certain blocks on one tier alone, whatever lies on others.

        It is empty if the overlap of any of the model's owners may have to be cut: what engines
        need of other groups is only known on the device.
        """

    def watch(
        self,
        owner: int,
        slot: int,
        tokens: Tokens | memoryview,
        lora: str | int | None,
        first: bytes | None,
        block_size: int,
    ) -> None:
        """Watches whether an owner stores the last block of a prompt that can be reused.

        slot: less than WATCHES; what it watched before is forgotten. first: as for `overlaps`.
        """

    def was_stored(self, owner: int, slot: int) -> bool:
        """Returns whether the block watched in a slot was stored since, even if it is gone now."""

    def remember_removals(self, count: int) -> None:
        """Remembers so many last removals of each owner, at 16 bytes each; to be called once."""

    def note_time(self, seconds: float) -> None:
        """Tells the time of the removals that follow, by any clock."""

    def removed_at(
        self,
        owner: int,
        tokens: Tokens | memoryview,
        lora: str | int | None,
        first: bytes | None,
        blocks: int,
    ) -> float | None:
        """Returns when an owner last removed the block of a prompt behind so many of its blocks.

        By the time told last before (`note_time`); None if it is not remembered. first: as for
        `overlaps`.
        """

    def status(self, owner: int) -> OwnerStatus:
        """Returns the counts of one owner."""

    def tiers(self, owner: int, uncertain: bool) -> tuple[int, int, int, int]:
        """Returns how many hashes an owner holds on each tier, certain or uncertain."""

    def expire(self, owner: int, slots: int) -> bool:
        """Forgets blocks on doubted media that were not stored again since the last age began.

        Makes blocks certain again that only the removal of a copy made uncertain, if the rule of
        copies is known by now; see `remove`.

        slots: the most table slots to check. Returns whether all were checked; then a new age
        begins.
        """

    def saved_learned(self, owner: int) -> bytes:
        """Returns what was learned of an owner's groups, layouts, media and copies."""

    def put_learned(self, owner: int, saved: bytes) -> bool:
        """Puts that into an empty owner, whose core has the same layout and secret.

        Returns False, with nothing changed, if the bytes are no such thing.
        """

    def saved_rows(self, owner: int, at: int, work: int) -> tuple[bytes, int | None]:
        """Returns rows of an owner's blocks, and where to continue; None if these are the last.

        at: where to begin, 0 at first; the blocks must not change until all are saved. work: the
        most table slots to look at. Rows have hashes and keys of blocks, no tokens.
        """

    def put_rows(self, owner: int, rows: bytes, at: int, work: int) -> int:
        """Puts saved rows into an owner that has none of them; returns where to continue.

        That is the length of the rows once all are in.

        Raises:
            ValueError: they are no rows, or too many; some may be in the owner by now.
        """

    def memory(self) -> int:
        """Returns the memory of all tables, in bytes."""

    def check(self) -> None:
        """Raises AssertionError if an invariant is violated; slow."""

def marks(body: bytes, /) -> tuple[int, int, int]: ...
def sizes(written: bytes, /) -> tuple[int, int]: ...
def marks_outside(body: bytes, max_quotes: int, /) -> tuple[int, int, int]: ...
def members(
    body: bytes,
    start: int,
    end: int,
    names: bytes,
    walked: int,
    parts: bytes,
    depth: int,
    /,
) -> tuple[tuple[tuple[int, int, int, int, int], ...], int, int, bool] | int: ...
def braces(body: bytes, /) -> tuple[int, bool] | None: ...
def splice(body: bytes, edits: tuple[tuple[int, int, bytes], ...], /) -> bytes: ...
