"""What a running worker tells about itself."""

from dataclasses import dataclass

from simulator.engine import Engine


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker."""

    name: str
    endpoint: str
    """host:port of its API."""
    events_endpoint: str | None
    replay_endpoint: str | None
    engine: Engine

    @property
    def url(self) -> str:
        """Of its API, without a slash at the end."""
        return f"http://{self.endpoint}"
