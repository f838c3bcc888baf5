"""The metrics as OpenTelemetry's observable instruments: the same figures, read, never counted
twice."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

Callback = Callable[[CallbackOptions], Iterable[Observation]]

# The parts of a family, each an instrument of its own: how its samples' names end, and how the
# instrument's does. OpenTelemetry has no observable histogram, so its three parts are counters.
_PARTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "gauge": (("", ""),),
    "counter": (("_total", ""),),
    "histogram": (("_bucket", "_bucket"), ("_count", "_count"), ("_sum", "_sum")),
}


class Instruments:
    """The instruments of a registry, which show what it held when it was last read.

    The registry belongs to one event loop and is read there, by `read`; the exporter's thread only
    sees what was read.
    """

    def __init__(self, registry: CollectorRegistry, meter: Meter) -> None:
        self._registry = registry
        self._meter = meter
        self._families: dict[str, Metric] = {}
        self._known: set[str] = set()

    def read(self) -> None:
        """Reads the registry; makes instruments for what was not there before."""
        families = {family.name: family for family in self._registry.collect()}
        for family in families.values():
            if family.name not in self._known:
                self._known.add(family.name)
                self._make(family)
        self._families = families

    def _make(self, family: Metric) -> None:
        for sample, ending in _PARTS[family.type]:
            callback = self._callback(family.name, family.name + sample)
            name = family.name + ending
            if family.type == "gauge":
                self._meter.create_observable_gauge(name, [callback], "", family.documentation)
            else:
                self._meter.create_observable_counter(name, [callback], "", family.documentation)

    def _callback(self, family: str, sample: str) -> Callback:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            known = self._families.get(family)
            samples = () if known is None else known.samples
            return [
                Observation(float(one.value), one.labels) for one in samples if one.name == sample
            ]

        return observe
