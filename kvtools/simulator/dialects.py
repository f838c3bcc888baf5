"""The engines and releases that a worker can imitate, and their differences.

Each name is that of the first release with the layout. vLLM: `vllm/distributed/kv_events.py` of
each release; SGLang: its `kv_events.py`; TensorRT-LLM: `_torch/pyexecutor/kv_cache_events.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvtools.simulator.events import DEVICE, BlockRemoved, BlockStored, Event

WireEvent = list[Any] | dict[str, Any]

# Maps leave these out when unset; arrays send every field, null or not.
_OPTIONAL = frozenset(
    {
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "session_id",
        "cache_salt",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLayout:
    """The fields of one dialect's events, in their order on the wire."""

    positional: bool
    """Events are arrays that begin with the event's name; else maps with it under `type`."""
    stored: tuple[str, ...]
    removed: tuple[str, ...]
    nulls: frozenset[str] = frozenset()
    """Fields that the engine has but never fills."""
    optional: frozenset[str] = _OPTIONAL
    appended: tuple[str, ...] = ()
    """Fields of a map that follows the array's others, if any of them is set."""
    tiers: bool = True
    """Whether blocks outside the device are announced."""
    merges_removals: bool = False
    """Whether consecutive removals become one event."""

    def encode(self, events: Iterable[Event]) -> list[WireEvent]:
        """Returns one step's events as they are sent."""
        shown = [event for event in events if self.tiers or _on_device(event)]
        if self.merges_removals:
            shown = _merged(shown)
        return [self._write(event) for event in shown]

    def _write(self, event: Event) -> WireEvent:
        name = type(event).__name__
        values = {
            field: None if field in self.nulls else getattr(event, field)
            for field in self._fields(event)
        }
        if not self.positional:
            return {"type": name, **_without_unset(values, self.optional)}
        return [name, *values.values(), *self._appendix(event)]

    def _fields(self, event: Event) -> tuple[str, ...]:
        match event:
            case BlockStored():
                return self.stored
            case BlockRemoved():
                return self.removed
            case _:
                return ()

    def _appendix(self, event: Event) -> list[dict[str, Any]]:
        values = {field: getattr(event, field, None) for field in self.appended}
        set_values = _without_unset(values, frozenset(self.appended))
        return [set_values] if set_values else []


def _on_device(event: Event) -> bool:
    return getattr(event, "medium", DEVICE) == DEVICE


def _merged(events: Sequence[Event]) -> list[Event]:
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if (
            isinstance(event, BlockRemoved)
            and isinstance(last, BlockRemoved)
            and event.medium == last.medium
        ):
            hashes = (*last.block_hashes, *event.block_hashes)
            merged[-1] = BlockRemoved(hashes, event.medium, event.group_idx)
        else:
            merged.append(event)
    return merged


def _without_unset(values: dict[str, Any], optional: frozenset[str]) -> dict[str, Any]:
    return {
        field: value
        for field, value in values.items()
        if value is not None or field not in optional
    }


EngineName = Literal["vllm", "sglang", "trtllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How an engine keeps blocks, and when it publishes events. The defaults are vLLM's."""

    shares_copies: bool = False
    """A block computed twice is kept once, as in a radix tree; else both copies are kept."""
    stores_answers_at_end: bool = False
    """Blocks of generated tokens are announced when the request ends; else when they fill up."""
    clears_at_start: bool = False
    """The first batch of an incarnation says that the cache is empty."""
    announces_clear: bool = True
    """A reset is one event; else each block is removed."""
    publishes_idle: bool = False
    """Events between steps are published at once; else with the next step."""
    host_medium: str = "CPU"
    """The medium of blocks that were evicted from the device and kept."""
    reports_last_answer: bool = True
    """Of several answers the cached tokens of the one that ended last are reported, whose prompt
    the first one has stored; else those of the first answer to each prompt, summed up."""


_HABITS: dict[EngineName, Habits] = {
    "vllm": Habits(),
    "sglang": Habits(
        shares_copies=True,
        stores_answers_at_end=True,
        clears_at_start=True,
        publishes_idle=True,
        host_medium="CPU_PINNED",
        reports_last_answer=False,
    ),
    "trtllm": Habits(
        shares_copies=True,
        stores_answers_at_end=True,
        announces_clear=False,
        publishes_idle=True,
        reports_last_answer=False,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDialect:
    """One engine from one release on."""

    name: str
    engine: EngineName
    version: str
    """The release that is imitated."""
    layout: EventLayout
    replay_topic: bool
    """Whether answers of the replay socket have a topic frame."""
    random_root: bool = False
    """Whether hashes differ from process to process."""
    lists_sources: bool = False
    """Whether GET /kv_event_sources exists; POST /v1/messages and /v1/responses are as old here."""
    publishes_load: bool = False
    """Whether it can publish its load (--load-publish-endpoint)."""
    names_no_hits: bool = True
    """Whether usage says that no tokens were cached; else it names cached tokens only where there
    are some."""
    habits: Habits = field(default_factory=Habits)


_OLDEST = EventLayout(
    positional=True,
    stored=("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
    removed=("block_hashes",),
    tiers=False,
)


def _vllm() -> Iterable[EventDialect]:
    """Yields vLLM's dialects; each release adds to the one before it.

    Fields that a simulated worker never sets (`locality`, `ownership`) are not listed: they came
    with maps, which leave them out.
    """
    v0_10 = _with_fields(_OLDEST, ("medium",), ("medium",), tiers=True)
    v0_14 = _with_fields(v0_10, ("lora_name",))
    v0_17 = _with_fields(v0_14, ("extra_keys",))
    v0_20 = _with_fields(v0_17, ("group_idx",), ("group_idx",))
    v0_22 = _with_fields(v0_20, ("kv_cache_spec_kind", "kv_cache_spec_sliding_window"))
    v0_24 = replace(v0_22, positional=False)
    v0_32 = _with_fields(v0_24, ("session_id",))
    for name, version, layout in (
        ("vllm-0.9", "0.9.2", _OLDEST),
        ("vllm-0.10", "0.10.2", v0_10),
        ("vllm-0.14", "0.14.1", v0_14),
        ("vllm-0.17", "0.17.1", v0_17),
        ("vllm-0.20", "0.20.0", v0_20),
        ("vllm-0.22", "0.22.1", v0_22),
        ("vllm-0.24", "0.24.0", v0_24),
        ("vllm-0.26", "0.26.0", v0_24),
        ("vllm-0.32", "0.32.0", v0_32),
    ):
        yield EventDialect(
            name=name,
            engine="vllm",
            version=version,
            layout=layout,
            replay_topic=name in {"vllm-0.26", "vllm-0.32"},
            random_root=layout is not v0_32,
            lists_sources=layout is v0_32,
            names_no_hits=layout is v0_32,
            habits=_HABITS["vllm"],
        )


def _sglang() -> Iterable[EventDialect]:
    optional = _OLDEST.optional | {"lora_name"}
    v0_4 = replace(_OLDEST, merges_removals=True, nulls=frozenset({"lora_id"}), optional=optional)
    v0_5_9 = _with_fields(v0_4, ("medium",), ("medium",), tiers=True)
    v0_5_18 = replace(v0_5_9, appended=("cache_salt",))
    v0_5_20 = replace(_with_fields(v0_5_9, ("cache_salt", "session_id")), positional=False)
    v0_5_22 = _with_fields(v0_5_20, ("lora_name",))
    for name, version, layout in (
        ("sglang-0.4", "0.4.10", v0_4),
        ("sglang-0.5.9", "0.5.9", v0_5_9),
        ("sglang-0.5.18", "0.5.18", v0_5_18),
        ("sglang-0.5.20", "0.5.20", v0_5_20),
        ("sglang-0.5.22", "0.5.23", v0_5_22),
    ):
        yield EventDialect(
            name=name,
            engine="sglang",
            version=version,
            layout=layout,
            replay_topic=layout is v0_5_22,
            publishes_load=not layout.positional,
            names_no_hits=False,
            habits=_HABITS["sglang"],
        )


def _trtllm() -> Iterable[EventDialect]:
    """Yields TensorRT-LLM's dialect, with those fields of its wire format that the engine fills."""
    layout = replace(
        _with_fields(_OLDEST, ("medium", "lora_name"), ("medium",)),
        positional=False,
        nulls=frozenset({"lora_name"}),
        merges_removals=True,
    )
    yield EventDialect(
        name="trtllm",
        engine="trtllm",
        version="1.4.0",
        layout=layout,
        replay_topic=True,
        habits=_HABITS["trtllm"],
    )


def _with_fields(
    layout: EventLayout,
    stored: tuple[str, ...],
    removed: tuple[str, ...] = (),
    *,
    tiers: bool | None = None,
) -> EventLayout:
    """Returns the layout with further fields at its end."""
    return replace(
        layout,
        stored=(*layout.stored, *stored),
        removed=(*layout.removed, *removed),
        tiers=layout.tiers if tiers is None else tiers,
    )


DIALECTS: dict[str, EventDialect] = {
    dialect.name: dialect for dialect in (*_vllm(), *_sglang(), *_trtllm())
}
DEFAULT = "vllm-0.32"
