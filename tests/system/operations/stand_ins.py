"""What a router's host is like, in tests: called in its process before it starts."""

import time
from collections.abc import Iterable

HOUR_SECONDS = 3600.0


def name_of_two(name: str) -> None:
    """Has a host name lead to two addresses of this host."""
    from extproc.fleet.asking.host_names import addresses_of
    from extproc.fleet.asking.surroundings import Surroundings
    from extproc.fleet.workers import Workers

    async def look_up(host: str) -> Iterable[str]:
        return ["127.0.0.1", "127.0.0.2"] if host == name else await addresses_of(host)

    defaults = Workers.__init__.__kwdefaults__
    assert defaults is not None
    defaults["surroundings"] = Surroundings(look_up=look_up)


def clock_ahead() -> None:
    """Sets the clock of the host an hour ahead."""
    real = time.time
    time.time = lambda: real() + HOUR_SECONDS
