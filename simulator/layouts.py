"""How a dialect writes one event: which fields, in which order, as an array or as a map."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.events import DEVICE, BlockRemoved, BlockStored, Event

WireEvent = list[Any] | dict[str, Any]

# Maps leave these out when unset; arrays send every field, null or not.
_OPTIONAL = frozenset(
    {
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
        *("session_id", "cache_salt"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The fields of one dialect's events, in their order on the wire."""

    positional: bool
    """Events are arrays that begin with the event's name; else maps with it under `type`."""
    stored: tuple[str, ...]
    removed: tuple[str, ...]
    nulls: frozenset[str] = frozenset()
    """Fields that the engine has and never fills."""
    optional: frozenset[str] = _OPTIONAL
    appended: tuple[str, ...] = ()
    """Fields of a map that follows the array's others, if any of them is set."""
    tiers: bool = True
    """Whether blocks elsewhere than on the device are announced."""
    merges_removals: bool = False
    """Whether removals that follow each other become one event."""

    def written(self, events: Iterable[Event]) -> list[WireEvent]:
        """One step's events as they are sent."""
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
