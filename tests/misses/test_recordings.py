"""What is kept of clients' conversations: what they said, and nothing of the machine."""

import json
import lzma
import re
from pathlib import Path

import pytest

from tests.misses.plays import compacted_at
from tests.misses.recordings import CLIENTS, file_of, recorded

# Of all recordings together.
MOST_BYTES = 300_000

# The folder in which clients are recorded, their key, and whoever runs this.
_OF_A_MACHINE = re.compile(r"kvsteer-record-|\.kvsteer|my-token|127\.0\.0\.1|localhost")
_HOME = f"{Path.home()}/"


@pytest.mark.parametrize("client", CLIENTS)
def test_recordings_name_neither_a_machine_nor_a_key(client: str) -> None:
    text = lzma.decompress(file_of(client).read_bytes()).decode()
    assert _OF_A_MACHINE.findall(text) == []
    assert len(_HOME) <= len("//") or _HOME not in text
    headers = {name for one in recorded(client).values() for name in one.asked[0].headers}
    assert headers & {"authorization", "host", "cookie"} == set()
    assert "user-agent" in headers


def test_recordings_are_small() -> None:
    assert sum(file_of(client).stat().st_size for client in CLIENTS) < MOST_BYTES


@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_has_long_conversations_one_of_which_it_compacted(client: str) -> None:
    conversations = recorded(client)
    assert set(conversations) == {"fixes", "is asked again", "goes on", "compacts"}
    for name in ("fixes", "is asked again", "goes on"):
        assert 6 <= len(conversations[name].turns) <= 12
    one = conversations["compacts"]
    assert "calc.py" in json.dumps(one.asked[compacted_at(one) - 1].body)
