"""Adapters that a worker's events name by number only."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet


class AdapterNumbers:
    """Which number an adapter has in the events of each worker for which that is known."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[int, set[str]]] = {}  # by the adapter's name and number

    def add(self, worker: str, adapters: Iterable[tuple[int, str]]) -> None:
        """Notes numbers and names of adapters of a worker."""
        for number, name in adapters:
            self._workers.setdefault(name, {}).setdefault(number, set()).add(worker)

    def remove(self, worker: str) -> None:
        """Forgets the numbers of a worker."""
        for name, numbers in list(self._workers.items()):
            for number, workers in list(numbers.items()):
                workers.discard(worker)
                if not workers:
                    del numbers[number]
            if not numbers:
                del self._workers[name]

    def workers_by_number(self, adapter: str) -> Mapping[int, AbstractSet[str]]:
        """Returns the numbers of an adapter, each with the workers in which it has that one."""
        return self._workers.get(adapter, {})

    def numbers(self, worker: str, adapter: str) -> list[int]:
        """Returns the numbers that an adapter has in a worker's events."""
        known = self.workers_by_number(adapter).items()
        return [number for number, workers in known if worker in workers]

    def workers(self) -> set[str]:
        """Returns the workers for which the number of any adapter is known."""
        found: set[str] = set()
        for numbers in self._workers.values():
            found.update(*numbers.values())
        return found
