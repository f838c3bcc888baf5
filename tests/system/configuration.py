"""The configuration with which every system of these tests begins.

There are three kinds of system, from the quickest to the truest:

- `gateway.Gateway`: the router in the test's process, before workers that the test writes itself;
- `system.System`: a router of its own process, before simulated workers in the test's process;
- `stage.Stage`: all parts are processes, workers too, so that each can be stopped and killed.

Each has a real Envoy.
"""

from typing import Any

from tests.ports import free_port

_LISTENING = {
    "extproc": ("listen",),
    "admin": ("listen",),
    "metrics": ("listen",),
    "envoy": ("listen", "admin"),
}

# On a busy machine a decision may take long; it is made all the same, and Envoy waits for it.
PATIENCE = {"extproc": {"deadline_ms": 10_000}, "envoy": {"message_timeout_ms": 20_000}}

# The same, as Envoy's own configuration has it.
ENVOY_WAITS = "20s"


def local_address() -> str:
    """A free port of loopback, as host:port."""
    return f"127.0.0.1:{free_port()}"


def configuration(sections: dict[str, Any]) -> dict[str, Any]:
    """These sections, with free addresses for whatever listens and is not told where."""
    listening = {
        section: {key: local_address() for key in keys} | sections.get(section, {})
        for section, keys in _LISTENING.items()
    }
    return sections | listening


def patient(sections: dict[str, Any]) -> dict[str, Any]:
    """These sections, with `PATIENCE` wherever they say nothing else."""
    waiting = {name: patience | sections.get(name, {}) for name, patience in PATIENCE.items()}
    return sections | waiting
