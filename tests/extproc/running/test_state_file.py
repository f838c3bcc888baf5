"""The state file: what is in it, when it is used, and that a damaged one is worth no more."""

import asyncio
import logging
import os
import random
import stat
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.running.restored_workers import RestoredWorkers
from extproc.running.state_file import StateCollector, StateFile, read
from kvstate.events import Batch
from kvstate.feeds.feed import FeedState, Restoration
from kvstate.feeds.transport import Connected, Malformed
from kvstate.fleet import FollowedWorkers
from kvstate.index.index import saved_layout
from kvstate.overlap import Overlap
from kvstate.rows.format import StateHeader
from kvstate.rows.reader import MAX_AGE_SECONDS, SavedState
from kvstate.rows.sections import Section, SectionWriter, sections_in
from kvstate.rows.writer import StateWriter
from kvstate.stores.stores import StoreRules
from tests.kvstate.publishing import block, chain, payload
from tests.memory_transport import MemoryTransport
from tests.waiting import until

SECRET = 0x0123_4567_89AB_CDEF
LAYOUT = saved_layout()
NOW = 1_700_000_000.0
ABOUT = StateHeader(LAYOUT, "1.0", NOW, SECRET)
STORE = StoreRules("pool", frozenset("w"), media=frozenset({"CPU"}))


class Note:
    """A keeper of one word."""

    section, version = "note", 3

    def __init__(self, word: bytes = b"") -> None:
        self.word = word
        self.proven: list[str] = []

    def saved(self) -> Iterator[bytes]:
        yield self.word

    def restore(self, contents: bytes) -> None:
        if not contents.isalpha():
            raise ValueError("it is no word")
        self.word = contents

    def note_proven(self, worker: str) -> None:
        self.proven.append(worker)


def batch(number: int) -> bytes:
    """A block that its worker stores, and puts into the store that it mounts."""
    own = block(number + 1, number or None)
    return payload(number, own, [*own, None, "CPU"])


def stored(fleet: FollowedWorkers) -> list[int]:
    """How many tokens of the chain are known to be in the store; empty if that does not count."""
    return [one.tokens for one in fleet.stores.stored(chain(20))]


def publisher(first: int, last: int) -> MemoryTransport:
    """A publisher whose buffer has these batches; batch n stores block n + 1, also in STORE."""
    made = MemoryTransport({n: batch(n) for n in range(first, last + 1)})
    made.put(Connected())
    return made


def engine(_worker: str) -> str:
    return "engine 1"


class Memory(NamedTuple):
    """What a router begins with, and its file."""

    restored: RestoredWorkers
    file: StateFile

    async def start(self) -> None:
        await self.restored.start()
        self.file.start()

    async def close(self) -> None:
        await self.file.close()
        await self.restored.close()


@asynccontextmanager
async def router(
    path: Path,
    state: SavedState | None,
    note: Note | None = None,
    store: StoreRules = STORE,
) -> AsyncIterator[tuple[FollowedWorkers, Memory]]:
    """A router's caches with their state file, not started yet."""
    secret = SECRET if state is None else state.about.secret
    fleet = FollowedWorkers(secret, lambda: NOW, stores=[store])
    about = msgspec.structs.replace(ABOUT, secret=fleet.secret)
    keepers = [] if note is None else [note]
    restored = RestoredWorkers(fleet, engine, keepers)
    if state is not None:
        restored.add(state)
    await restored.begin()
    file = StateFile(str(path), 60.0, fleet, lambda: about, engine, keepers)
    yield fleet, Memory(restored, file)
    await fleet.close()


async def written(path: Path, word: bytes = b"word") -> None:
    """Writes the file of a router whose worker sent the batches 0 to 5."""
    async with router(path, None, Note(word)) as (fleet, memory):
        fleet.add("w", "m", [publisher(0, 5)])
        await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
        await memory.start()
        await memory.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


async def test_restarted_router_is_certain_before_it_serves(path: Path) -> None:
    await written(path)
    state, note = read(str(path), LAYOUT, NOW + 60), Note()
    async with router(path, state, note) as (fleet, memory):
        fleet.add("w", "m", [publisher(5, 7)])
        await memory.start()
        assert fleet.blocks.overlaps(chain(20)) == {"w": Overlap(1, (8, 0, 0, 0))}
        assert (note.word, note.proven) == (b"word", ["w"])
        shown = {
            one.name: one.samples for one in StateCollector(memory.file, memory.restored).collect()
        }
        (proven, *_) = shown["kvsteer_state_file_workers"]
        assert (proven.labels, proven.value) == ({"outcome": "proven"}, 1)
        await memory.close()
        assert memory.file.bytes == path.stat().st_size > 0


async def test_restarted_router_knows_what_is_in_a_store(path: Path) -> None:
    await written(path)
    async with router(path, read(str(path), LAYOUT, NOW)) as (fleet, memory):
        assert stored(fleet) == []
        fleet.add("w", "m", [publisher(5, 7)])
        await memory.start()
        assert stored(fleet) == [8]
        await memory.close()


async def test_store_whose_publisher_was_restarted_is_forgotten(path: Path) -> None:
    await written(path)
    async with router(path, read(str(path), LAYOUT, NOW)) as (fleet, memory):
        fleet.add("w", "m", [publisher(0, 2)])
        await memory.start()
        assert stored(fleet) == []
        await until(lambda: dict(fleet.stores.blocks()) == {"pool": 0})
        await memory.close()


async def test_store_that_is_configured_differently_begins_empty(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await written(path)
    other = STORE._replace(max_age_seconds=1.0)
    async with router(path, read(str(path), LAYOUT, NOW), store=other) as (fleet, _):
        assert dict(fleet.stores.blocks()) == {"pool": 0}
    assert "store pool is not used: it is configured differently now" in caplog.text


class PausingPublisher(MemoryTransport):
    """Pauses in its replays after the first batch, until `goes_on` is set."""

    goes_on: asyncio.Event

    async def replay(self, start: int) -> AsyncGenerator[Batch | Malformed]:
        async for batch in super().replay(start):
            yield batch
            await self.goes_on.wait()


async def test_router_serves_only_once_what_came_since_is_applied(path: Path) -> None:
    await written(path)
    async with router(path, read(str(path), LAYOUT, NOW)) as (fleet, memory):
        pausing = PausingPublisher(publisher(5, 7).history)
        pausing.goes_on = asyncio.Event()
        pausing.put(Connected())
        fleet.add("w", "m", [pausing])
        starting = asyncio.create_task(memory.start())
        await until(lambda: fleet.feeds.restoration("w") is Restoration.PROVEN)
        await asyncio.sleep(0)
        assert not starting.done()
        pausing.goes_on.set()
        await starting
        assert fleet.blocks.overlaps(chain(20)) == {"w": Overlap(1, (8, 0, 0, 0))}
        await memory.close()


async def test_worker_that_has_not_proven_it_yet_delays_no_start_for_long(path: Path) -> None:
    await written(path)
    state, note = read(str(path), LAYOUT, NOW), Note()
    async with router(path, state, note) as (fleet, memory):
        late = MemoryTransport({5: batch(5)})
        fleet.add("w", "m", [late])
        await memory.start()
        assert fleet.blocks.overlaps(chain(20)) == {"w": Overlap(1, uncertain=6)}
        late.put(Connected())
        await until(lambda: note.proven)
        await memory.close()


@pytest.mark.parametrize(
    ("worker", "model", "ranks"), [("v", "m", 1), ("w", "other", 1), ("w", "m", 2)]
)
async def test_other_workers_begin_with_nothing(
    path: Path, worker: str, model: str, ranks: int
) -> None:
    await written(path)
    async with router(path, read(str(path), LAYOUT, NOW)) as (_, memory):
        assert memory.restored.take(worker, model, ranks) == {}
        assert memory.restored.take("w", "m", 1).keys() == ({0} if worker == "v" else set())


async def test_file_is_readable_by_its_user_alone_and_names_no_token(path: Path) -> None:
    path.write_text("old")
    path.chmod(0o644)
    await written(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["state"]


async def test_file_that_cannot_be_written_is_said_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with router(path / "no folder" / "file", None) as (_, memory):
        await memory.file.write()
        await memory.file.write()
        assert caplog.text.count("cannot be written: No such file or directory") == 1
        assert memory.file.bytes == 0


async def test_router_that_did_not_start_leaves_the_file(path: Path) -> None:
    await written(path)
    before = path.read_bytes()
    async with router(path, read(str(path), LAYOUT, NOW)) as (_, memory):
        await memory.close()
    assert path.read_bytes() == before


async def test_file_is_written_at_once_before_a_stop(path: Path) -> None:
    async with router(path, None) as (_, memory):
        await memory.start()
        memory.file.hurry()
        await until(path.exists)
        await memory.close()


def test_router_without_a_file_shows_no_figures() -> None:
    assert not any(one.samples for one in StateCollector(None).collect())


def refusals(path: Path) -> dict[str, str]:
    """Files that are refused, by the words that say why."""
    nobody = SectionWriter()
    files = {
        "cut off": path.read_bytes()[:-1],
        "not a state file": b"",
        "does not say who": nobody.begin() + nobody.end(),
    }
    for why, about in {
        "another core": msgspec.structs.replace(ABOUT, layout="plain 0"),
        "hours old": msgspec.structs.replace(ABOUT, written_at=NOW - MAX_AGE_SECONDS - 1),
        "its secret": msgspec.structs.replace(ABOUT, secret=-1),
    }.items():
        writer = StateWriter()
        files[why] = writer.begin(about) + writer.end()
    return {why: str(_put(path.with_name(why), data)) for why, data in files.items()}


def _put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


async def test_refused_files_are_named_with_the_reason(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await written(path)
    for why, file in refusals(path).items():
        caplog.clear()
        assert read(file, LAYOUT, NOW) is None
        assert f"{file} is not used: " in caplog.text
        assert why in caplog.text


async def test_files_that_others_may_have_written_are_refused(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await written(path)
    path.chmod(0o666)
    assert read(str(path), LAYOUT, NOW) is None
    assert "other users may write to it" in caplog.text
    path.chmod(0o600)
    link = path.with_name("link")
    link.symlink_to(path)
    assert read(str(link), LAYOUT, NOW) is None
    assert "cannot be read" in caplog.text
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    assert read(str(pipe), LAYOUT, NOW) is None
    assert "it is not a file" in caplog.text
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        assert read(str(path), LAYOUT, NOW) is None
        assert "it belongs to user 12345" in caplog.text


def test_missing_file_is_no_fault(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert read(str(path), LAYOUT, NOW) is None
    assert "there is no" in caplog.text


async def test_section_of_another_version_is_skipped(path: Path) -> None:
    await written(path)
    state = read(str(path), LAYOUT, NOW)
    assert state is not None
    state.others["note"] = [Section("note", 4, b"other")]
    note = Note(b"own")
    async with router(path, state, note):
        assert note.word == b"own"


async def test_section_that_its_keeper_refuses_is_skipped(path: Path) -> None:
    await written(path, b"no word at all")
    note = Note(b"own")
    async with router(path, read(str(path), LAYOUT, NOW), note):
        assert note.word == b"own"


def forged(whole: bytes, at: int, contents: bytes) -> bytes:
    """The file with other contents of one section, under checksums that match."""
    writer = SectionWriter()
    parts = [writer.begin()]
    for number, one in enumerate(sections_in(whole)):
        changed = contents if number == at else bytes(one.contents)
        parts.append(writer.section(one.name, one.version, changed))
    return b"".join([*parts, writer.end()])


async def begins_clean(path: Path, data: bytes) -> None:
    """Asserts that a router which finds this file is never certain of what it should not be."""
    state = read(str(_put(path, data)), LAYOUT, NOW)
    if state is None:
        return
    async with router(path, state, Note()) as (fleet, memory):
        fleet.add("w", "m", [publisher(0, 2)])  # it has restarted: none of the file is true
        await asyncio.wait_for(memory.start(), 10)
        await until(lambda: fleet.feeds.state("w") is FeedState.LIVE)
        assert fleet.blocks.overlaps(chain(20)) == {"w": Overlap(1, (3, 0, 0, 0))}
        assert stored(fleet) in ([], [3])
        await memory.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as it was written."""
    path = tmp_path_factory.mktemp("whole") / "state"
    asyncio.run(written(path))
    return path


DAMAGED_AT_ONCE = 10  # so thorough runs try a thousand files


@settings(deadline=None)
@given(data=st.data())
def test_damaged_files_begin_clean(whole: Path, data: st.DataObject) -> None:
    before = whole.read_bytes()
    for _ in range(DAMAGED_AT_ONCE):
        at = data.draw(st.integers(0, len(before) - 1))
        damaged = bytearray(before)
        damaged[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
        asyncio.run(begins_clean(whole.with_name("damaged"), bytes(damaged)))


@pytest.mark.slow
def test_a_thousand_files_damaged_in_every_region_begin_clean(whole: Path) -> None:
    before, chances = whole.read_bytes(), random.Random(37)
    kinds: Counter[str] = Counter()
    for number in range(1_000):
        at = number * len(before) // 1_000
        (kind, damaged), *_ = chances.sample(list(damages(before, at, chances).items()), 1)
        kinds[kind] += damaged != before
        asyncio.run(begins_clean(whole.with_name("damaged"), damaged))
    assert min(kinds.values()) > 150


def damages(before: bytes, at: int, chances: random.Random) -> dict[str, bytes]:
    """What may become of a file at this byte."""
    end = at + chances.randrange(1, 40)
    return {
        "a bit": before[:at] + bytes([before[at] ^ 1 << chances.randrange(8)]) + before[at + 1 :],
        "cut off": before[:at],
        "left out": before[:at] + before[end:],
        "repeated": before[:end] + before[at:],
        "other bytes": before[:at] + chances.randbytes(end - at) + before[end:],
    }


VALUES: tuple[object, ...] = (None, True, -1, 0, 2**64 - 1, float("nan"), 1e300, "", "\0", b"x", [])


@pytest.mark.slow
def test_files_with_any_damaged_field_begin_clean(whole: Path) -> None:
    before = whole.read_bytes()
    tried = Counter[str]()
    for at, section in enumerate(sections_in(before)):
        if section.name not in ("about", "rank", "store"):
            continue
        tree = msgspec.msgpack.decode(section.contents)
        for path in paths_in(tree):
            for value in VALUES:
                contents = msgspec.msgpack.encode(with_value(tree, path, value))
                asyncio.run(begins_clean(whole.with_name("damaged"), forged(before, at, contents)))
                tried[section.name] += 1
    assert tried["about"] == 4 * len(VALUES)
    assert tried["rank"] > 20 * len(VALUES)
    assert tried["store"] > 10 * len(VALUES)


def paths_in(tree: list[object], path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Where every field of a section is, however deep."""
    for at, inner in enumerate(tree):
        yield (*path, at)
        if isinstance(inner, list):
            yield from paths_in(inner, (*path, at))


def with_value(tree: list[object], path: tuple[int, ...], value: object) -> list[object]:
    at, *rest = path
    inner = tree[at]
    changed = with_value(inner, tuple(rest), value) if rest and isinstance(inner, list) else value
    return [*tree[:at], changed, *tree[at + 1 :]]


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=60),
    st.just([]),
)


@settings(deadline=None)
@given(data=st.data())
def test_damaged_fields_begin_clean(whole: Path, data: st.DataObject) -> None:
    before = whole.read_bytes()
    sections = list(sections_in(before))
    at = data.draw(st.integers(0, len(sections) - 1))
    contents = bytes(sections[at].contents)
    if sections[at].name in ("about", "rank"):
        tree = msgspec.msgpack.decode(contents)
        contents = msgspec.msgpack.encode(_changed(tree, data))
    else:
        begin = data.draw(st.integers(0, len(contents) - 1))
        changed = data.draw(st.binary(max_size=30))
        contents = contents[:begin] + changed + contents[begin + data.draw(st.integers(0, 30)) :]
    asyncio.run(begins_clean(whole.with_name("damaged"), forged(before, at, contents)))


def _changed(tree: list[object], data: st.DataObject) -> list[object]:
    """One field of a section, however deep, has another value."""
    at = data.draw(st.integers(0, len(tree) - 1))
    inner = tree[at]
    if isinstance(inner, list) and inner and data.draw(st.booleans()):
        return [*tree[:at], _changed(inner, data), *tree[at + 1 :]]
    return [*tree[:at], data.draw(ANY), *tree[at + 1 :]]
