"""Rules about several routers: what cannot be meant, and what leaves a fleet open."""

import re
from collections.abc import Iterator

from extproc import address
from extproc.config.sections import CONVERSATION, STANDBY, Routers, Sharing

# What a router may be called, and how long that may be; as messages between routers have it.
_ROUTER_NAME = re.compile(r"[!-~]+")
_NAME_CHARACTERS = 64

# As HTTP has the name of a field.
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,256}")

# Of a datagram socket in a directory: its own name, at most.
_SOCKET_NAME_BYTES = 32


def sharing_faults(sharing: Sharing | None, processes: int) -> Iterator[str]:
    """Yields what is wrong with the section sharing.

    processes: of a router; where there are several, each puts its number behind the name.
    """
    if sharing is None:
        return
    try:
        meeting = address.parse_meeting(sharing.url)
    except ValueError as error:
        yield f"sharing.url: {error}"
        return
    path, room = meeting.socket, address.MAX_PATH_BYTES
    if meeting.directory:
        path, room = meeting.directory, address.MAX_PATH_BYTES - _SOCKET_NAME_BYTES
    size = len(path.encode())
    if size > room:
        yield f"sharing.url: the path has {size} bytes; {room} are the most"
    most = _NAME_CHARACTERS - (len(f"-{processes - 1}") if processes > 1 else 0)
    name = sharing.name
    if name is not None and not (_ROUTER_NAME.fullmatch(name) and len(name) <= most):
        yield f"sharing.name: must be 1 to {most} printable ASCII characters without spaces"
    if sharing.ca is not None and not meeting.is_tls:
        yield "sharing.ca: needs a url of valkeys:// or rediss://"
    if meeting.directory and (sharing.username or sharing.password_file):
        yield "sharing: username and password_file are for an engine, not for a directory"
    if sharing.username is not None and sharing.password_file is None:
        yield "sharing.username: needs password_file"


def sharing_doubts(sharing: Sharing | None) -> Iterator[str]:
    """Yields a fleet whose messages anybody who reaches the engine can make up."""
    if sharing is None or sharing.secret_file is not None or sharing.password_file is not None:
        return
    if not sharing.url.startswith(address.DIRECTORY_PREFIX):
        yield (
            "sharing.secret_file: without it or a password_file, whoever reaches the engine can"
            " tell the routers anything"
        )


def router_faults(router: str | None, routers: Routers | None) -> Iterator[str]:
    """Yields what is wrong with the section envoy.routers; router: what envoy.router says."""
    if routers is None:
        return
    if router is not None:
        yield "envoy.routers: stands instead of envoy.router: remove one of the two"
    if not routers.addresses:
        yield "envoy.routers.addresses: needs at least one"
    twice = {text for text in routers.addresses if routers.addresses.count(text) > 1}
    yield from (f"envoy.routers.addresses: {text} is given twice" for text in sorted(twice))
    if routers.choice == STANDBY and len(routers.addresses) == 1:
        yield "envoy.routers.choice: standby needs two addresses or more, in their order"
    if routers.choice == CONVERSATION and not routers.conversation_headers:
        yield "envoy.routers.conversation_headers: choice conversation needs at least one"
    for name in routers.conversation_headers:
        if not _HEADER_NAME.fullmatch(name):
            yield f"envoy.routers.conversation_headers: {name!r} is no header's name"
