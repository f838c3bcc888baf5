"""vLLM's prefix cache: which blocks a request reuses, fills and overwrites, and what is announced.

Pure: nothing here sleeps, sends or looks at a clock. Calls change the state at once and leave
events behind, which `take_events` hands over; one scheduler step is whatever lies between two of
those calls. Only full blocks are reusable and announced.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from simulator.events import ATTENTION, MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event
from simulator.hashing import Namespace, block_digest, chain, wire_hash
from simulator.pool import BlockPool

_GROUP = 0  # a model with one kind of attention has one group of caches


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks that one running request uses, for as long as it runs."""

    namespace: Namespace
    session_id: str | None
    tokens: list[int]
    """All tokens whose KV is computed: the prompt, then what was generated but the last."""
    cached_tokens: int
    """How many leading tokens of the prompt were found in the cache."""
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Of the full blocks, first to last."""


class PrefixCache:
    """The cache of one worker: `blocks` blocks, one of them reserved, of `block_size` tokens."""

    def __init__(self, *, blocks: int, block_size: int) -> None:
        self._pool = BlockPool(blocks)
        self._block_size = block_size
        self._events: list[Event] = []

    @property
    def usage(self) -> float:
        """The share of blocks that running requests use, 0 to 1."""
        return 1 - self._pool.unused / self._pool.usable

    def begin(
        self,
        prompt: Sequence[int],
        namespace: Namespace,
        *,
        session_id: str | None = None,
        reuse: bool = True,
    ) -> Holding | None:
        """Prefill a prompt; None, and nothing changed, while too few blocks are unused.

        With `reuse` off the cache is filled but not read, as vLLM does for `prompt_logprobs`.
        """
        digests = list(chain(prompt, self._block_size, namespace))
        found = self._find(digests, len(prompt)) if reuse else []
        missing = -(-len(prompt) // self._block_size) - len(found)
        if missing + sum(map(self._pool.is_unused, found)) > self._pool.unused:
            return None
        for block in found:
            self._pool.share(block)
        holding = Holding(namespace, session_id, list(prompt), len(found) * self._block_size)
        holding.blocks = found + [self._take() for _ in range(missing)]
        holding.digests = digests
        self._announce(holding, len(found))
        return holding

    def extend(self, holding: Holding, token: int) -> bool:
        """Compute one generated token; False, and nothing changed, if no block is left for it."""
        if len(holding.tokens) == len(holding.blocks) * self._block_size:
            if not self._pool.unused:
                return False
            holding.blocks.append(self._take())
        holding.tokens.append(token)
        if len(holding.tokens) == len(holding.blocks) * self._block_size:
            parent = holding.digests[-1] if holding.digests else None
            last = holding.tokens[-self._block_size :]
            holding.digests.append(block_digest(parent, last, holding.namespace))
            self._announce(holding, len(holding.digests) - 1)
        return True

    def release(self, holding: Holding) -> None:
        """End the request. Its last block queues first: a chain is overwritten from its end."""
        self._pool.release(reversed(holding.blocks))
        holding.blocks = []

    def reset(self) -> bool:
        """Forget everything, announced with the next step; refused while a request runs."""
        if self._pool.unused < self._pool.usable:
            return False
        self._pool.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _find(self, digests: Sequence[bytes], prompt_tokens: int) -> list[int]:
        # The engine needs the logits of the last token, so it always computes that token's block.
        usable = digests[: (prompt_tokens - 1) // self._block_size]
        found = takewhile(lambda block: block is not None, map(self._pool.find, usable))
        return [block for block in found if block is not None]

    def _take(self) -> int:
        block, lost = self._pool.take()
        if lost is not None:
            self._events.append(BlockRemoved((wire_hash(lost),), MEDIUM, _GROUP))
        return block

    def _announce(self, holding: Holding, start: int) -> None:
        """Make the full blocks from number `start` on reusable, in one event."""
        new = holding.digests[start:]
        if not new:
            return
        for block, digest in zip(holding.blocks[start:], new, strict=False):
            self._pool.fill(block, digest)
        namespace, size = holding.namespace, self._block_size
        adapter = namespace.adapter
        self._events.append(
            BlockStored(
                block_hashes=tuple(map(wire_hash, new)),
                parent_block_hash=wire_hash(holding.digests[start - 1]) if start else None,
                token_ids=tuple(holding.tokens[start * size : len(holding.digests) * size]),
                block_size=size,
                lora_id=adapter.number if adapter else None,
                medium=MEDIUM,
                lora_name=adapter.name if adapter else None,
                extra_keys=tuple(
                    namespace.published_keys(first=not (start + offset))
                    for offset in range(len(new))
                ),
                group_idx=_GROUP,
                kv_cache_spec_kind=ATTENTION,
                session_id=holding.session_id,
            )
        )
