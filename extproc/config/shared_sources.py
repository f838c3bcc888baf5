"""Places that two workers name as their own, as a copied line does: an endpoint, a feed.

A feed's messages do not say which worker sent them: what two workers claim would be credited to
both.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from extproc import address
from extproc.address import Address
from extproc.config.workers import Worker, WorkerEvents

_LOOPBACK = "127.0.0.1"


def same_place(place: Address) -> Address:
    """An address in the one spelling by which it is compared."""
    host = place.host.lower()
    return Address(_LOOPBACK if host == "localhost" else host, place.port)


def shared_endpoints(key: str, workers: Sequence[Worker]) -> Iterator[str]:
    """What is wrong where workers have one endpoint.

    key: of the list of workers.
    """
    spelled: dict[Address | str, list[str]] = defaultdict(list)
    for worker in workers:
        try:
            spelled[same_place(address.parse(worker.endpoint))].append(worker.endpoint)
        except ValueError:  # told as what it is
            spelled[worker.endpoint].append(worker.endpoint)
    for texts in spelled.values():
        several = list(dict.fromkeys(texts))
        if len(several) > 1:
            yield f"{key}: the endpoints {' and '.join(several)} are the same"
        elif len(texts) > 1:
            yield f"{key}: the endpoint {texts[0]} is given {len(texts)} times"


def shared_feeds(key: str, workers: Sequence[Worker]) -> Iterator[str]:
    """What is wrong where workers have one feed, or ranks of theirs; one fault a worker and key.

    key: of the list of workers.
    """
    owners: dict[tuple[object, ...], int] = {}
    for position, worker in enumerate(workers):
        if not isinstance(worker.events, WorkerEvents):
            continue
        told: set[str] = set()
        for name, place, source in _sources(worker.events):
            owner = owners.setdefault(source, position)
            if owner != position and name not in told:
                told.add(name)
                yield f"{key}[{position}].events.{name}: {place} is that of {key}[{owner}] too"


def _sources(events: WorkerEvents) -> Iterator[tuple[str, Address, tuple[object, ...]]]:
    """The key that names a source, its address, and what no other worker may have as well.

    Publishers behind one proxy have one address, and a topic each.
    """
    tcp, topic = address.parse_tcp, None if events.bind else events.topic
    yield from _places("zmq", events.zmq, tcp, events.ranks, topic)
    yield from _places("replay", events.replay, tcp, events.ranks)
    yield from _places("grpc", events.grpc, address.parse, 1, events.service)
    yield from _places("drain", events.drain, address.parse_http)


def _places(
    name: str,
    text: str | None,
    parse: Callable[[str], Address],
    ranks: int = 1,
    beside: str | None = None,
) -> Iterator[tuple[str, Address, tuple[object, ...]]]:
    """One a rank; none of an address that cannot be read, which is told as what it is."""
    if text is None:
        return
    try:
        host, port = parse(text)
    except ValueError:
        return
    for one in range(port, min(port + ranks, address.MAX_PORT + 1)):
        place = Address(host, one)
        yield name, place, (name, same_place(place), beside)
