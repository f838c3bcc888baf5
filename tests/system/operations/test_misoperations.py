"""Each row of docs/internals/faults.md's table of mis-operations, played before a real Envoy.

Every place that the table names has to say what is wrong: GET /faults (which the page shows), the
lines of /readyz, `health` and `top`, the metric, the log, the doctor without --probe, and the rule
of an alert.
"""

import asyncio
import contextlib
import gzip
import io
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import yaml
import zmq
import zmq.asyncio

from extproc.base.fault import KINDS
from extproc.commands.health import fault_of, faults_at
from extproc.config.reader import load
from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from kvtools import top
from kvtools.doctor.doctor import examine
from kvtools.doctor.findings import Severity
from tests import copies
from tests.extproc.serving.identities import NAME, Identities
from tests.kvtools.doctor.fleet import BRIEF
from tests.ports import free_port
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "internals" / "faults.md").read_text()
RULES = (ROOT / "deploy" / "prometheus" / "kvsteer.rules.yml").read_text()
DOCTOR_SECONDS = 2.0

Edit = Callable[[dict[str, Any]], None]
Play = contextlib.AbstractAsyncContextManager[System]


class Row(NamedTuple):
    """One row; "" for none.

    fault: its code. log: words in the log. doctor: the code of its finding. alert: its name.
    """

    fault: str
    log: str
    doctor: str
    alert: str


def documented() -> dict[str, Row]:
    """The rows of the table, by what is wrong."""
    table = PAGE.partition("## Mis-operations")[2].partition("\n## ")[0]
    pattern = r"^\| (?!---)([^|]*) \| (.*) \| (.*) \| (.*) \| (.*) \|$"
    found = re.findall(pattern, table, re.MULTILINE)
    rows = [[re.sub(r"^-$", "", one.replace("`", "")) for one in row] for row in found[1:]]
    return {what: Row(*rest) for what, *rest in rows}


async def restarted(system: System, edit: Edit, before: Sequence[str] = ()) -> None:
    """Starts the router again with a changed configuration, whatever becomes of its feeds."""
    content = yaml.safe_load(system.config_file.read_text())
    edit(content)
    system.config_file.write_text(yaml.safe_dump(content))
    await system.stop_router()
    with system.log.open("ab") as log:
        command = ["serve", "--config", str(system.config_file)]
        system.router = copies.started_at_once(command, log, before)

    async def answers() -> bool:
        assert system.router is not None
        assert system.router.returncode is None, system.log.read_text()
        with contextlib.suppress(aiohttp.ClientError):
            async with system.session.get(f"{system.admin}/faults") as answer:
                return answer.status == 200
        return False

    await until(answers, "the router answers")


@contextlib.asynccontextmanager
async def configured(
    edit: Edit, before: Sequence[str] = (), **settings: Any
) -> AsyncIterator[System]:
    """A system whose router was started again with a mistake in its configuration."""
    async with running(2, **settings) as system:
        await restarted(system, edit, before)
        yield system


@contextlib.asynccontextmanager
async def broken(
    act: Callable[[System], Awaitable[None]], workers: int = 2, **settings: Any
) -> AsyncIterator[System]:
    """A system in which something breaks while it runs."""
    async with running(workers, **settings) as system:
        await act(system)
        yield system


def events(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Edit:
    """Changes the events of the first worker; the second argument is the worker."""

    def edit(content: dict[str, Any]) -> None:
        worker = content["workers"][0]
        change(worker["events"], worker)

    return edit


def nobody(given: dict[str, Any], _: dict[str, Any]) -> None:
    given["zmq"] = f"tcp://127.0.0.1:{free_port()}"


def http_port(given: dict[str, Any], worker: dict[str, Any]) -> None:
    given["zmq"] = f"tcp://{worker['endpoint']}"


def replays_port(given: dict[str, Any], _: dict[str, Any]) -> None:
    given["zmq"], given["replay"] = given["replay"], None


def exchanged(given: dict[str, Any], _: dict[str, Any]) -> None:
    given["zmq"], given["replay"] = given["replay"], given["zmq"]


def no_replay(given: dict[str, Any], _: dict[str, Any]) -> None:
    given["replay"] = None


def refused_replay(given: dict[str, Any], _: dict[str, Any]) -> None:
    given["replay"] = f"tcp://127.0.0.1:{free_port()}"


def second_rank(given: dict[str, Any], _: dict[str, Any]) -> None:
    given["ranks"], given["replay"] = 2, None


def block_size(_: dict[str, Any], worker: dict[str, Any]) -> None:
    worker["block_size"] = 32


def name_of_nobody(_: dict[str, Any], worker: dict[str, Any]) -> None:
    worker["endpoint"] = "nowhere.invalid:8000"


def name_of_two(_: dict[str, Any], worker: dict[str, Any]) -> None:
    worker["endpoint"] = f"workers.test:{worker['endpoint'].rpartition(':')[2]}"


def another_topic(given: dict[str, Any], _: dict[str, Any]) -> None:
    given["topic"] = "kv@"


def swapped(content: dict[str, Any]) -> None:
    one, other = content["workers"]
    one["events"], other["events"] = other["events"], one["events"]


def two_routers(content: dict[str, Any]) -> None:
    listen = content["extproc"]["listen"]
    content["envoy"]["routers"] = {"addresses": [listen, f"127.0.0.1:{free_port()}"]}


def sharing(content: dict[str, Any]) -> None:
    content["sharing"] = {"url": f"valkey://127.0.0.1:{free_port()}/0"}


async def serve_some(system: System) -> None:
    for seed in ("a", "b"):
        await system.serve(system.workers[0], long_text(seed))


@contextlib.asynccontextmanager
async def told(edit: Edit, before: Sequence[str] = (), **settings: Any) -> AsyncIterator[System]:
    """A system with a mistake that the first worker's events show."""
    async with configured(edit, before, **settings) as system:
        await serve_some(system)
        yield system


async def lose_a_batch(system: System) -> None:
    system.workers[0].faults.drop(1)
    await serve_some(system)


async def ask_until(system: System, code: str) -> None:
    """Sends prompts, each twice, until the router sees the fault."""

    async def is_found() -> bool:
        body = chat(long_text(f"prompt {next(COUNT)}"))
        for _ in range(2):
            await system.send(body)
        return await is_shown(system, code) is not None

    await until(is_found, f"{code} is found", pause=0.2)


@contextlib.asynccontextmanager
async def asked(edit: Edit, code: str, **settings: Any) -> AsyncIterator[System]:
    """A system with a mistake that many requests show."""
    async with configured(edit, **settings) as system:
        await ask_until(system, code)
        yield system


@contextlib.asynccontextmanager
async def relayed() -> AsyncIterator[System]:
    """A system in which a relay passes on the first worker's events without their numbers."""
    async with running(2) as system, contextlib.AsyncExitStack() as stack:
        content = yaml.safe_load(system.config_file.read_text())
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        taken, given = context.socket(zmq.SUB), context.socket(zmq.PUB)
        taken.connect(content["workers"][0]["events"]["zmq"])
        taken.subscribe(b"")
        port = given.bind_to_random_port("tcp://127.0.0.1")

        async def relay() -> None:
            while True:
                topic, _, batch = await taken.recv_multipart()
                await given.send_multipart([topic, batch])

        def read_the_relay(given: dict[str, Any], _: dict[str, Any]) -> None:
            given["zmq"], given["replay"] = f"tcp://127.0.0.1:{port}", None

        relaying = asyncio.create_task(relay())
        stack.callback(relaying.cancel)
        await restarted(system, events(read_the_relay))
        await ask_until(system, "feed-unsequenced")
        yield system


@contextlib.asynccontextmanager
async def losing(edit: Edit) -> AsyncIterator[System]:
    """A system with a mistake that shows once events are lost."""
    async with configured(edit) as system:
        await lose_a_batch(system)
        yield system


async def kill(system: System) -> None:
    await system.stop_worker(system.workers[0].endpoint)


async def hang(system: System) -> None:
    """Has the first worker accept connections and say nothing."""
    endpoint = system.workers[0].endpoint
    await system.stop_worker(endpoint)
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    silent.bind(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    silent.listen()
    SILENT.append(silent)


SILENT: list[socket.socket] = []


async def ask_for_an_adapter(system: System) -> None:
    for number in range(40):
        await system.send(chat(f"question {number}", model="adapter"))


async def ask_many(system: System) -> None:
    async def is_missed() -> bool:
        for _ in range(30):
            number = next(COUNT)
            await system.send(chat(long_text(f"n{number}")))
        return await is_shown(system, "not-delivered") is not None

    await until(is_missed, "too many requests were answered elsewhere")


COUNT = iter(range(1_000_000))


async def ask_without_a_router(system: System) -> None:
    async def is_missed() -> bool:
        await system.send(chat(long_text(f"n{next(COUNT)}")))
        return await is_shown(system, "not-asked") is not None

    await until(is_missed, "the router finds that nobody asks it", seconds=120, pause=0.2)


async def ask_some(system: System) -> None:
    for number in range(30):
        await system.send(chat(f"question {number}"))


async def ask_compressed(system: System) -> None:
    for number in range(30):
        body = gzip.compress(json.dumps(chat(f"question {number}")).encode())
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        url = f"{system.envoy}/v1/chat/completions"
        async with system.session.post(url, data=body, headers=headers) as answer:
            await answer.read()


async def ask_under_a_prefix(system: System) -> None:
    for number in range(20):
        url = f"{system.envoy}/llm/v1/chat/completions"
        async with system.session.post(url, json=chat(f"question {number}")) as answer:
            assert answer.status == 200


def changed_envoy(change: Callable[[dict[str, Any]], None]) -> Callable[[Config], str]:
    """Returns what renders an Envoy with a change of its resources."""

    def rendered(config: Config) -> str:
        tree = yaml.safe_load(render(config))
        change(tree["static_resources"])
        return yaml.safe_dump(tree)

    return rendered


def manager_of(resources: dict[str, Any]) -> dict[str, Any]:
    (listener,) = resources["listeners"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def fails_open(resources: dict[str, Any]) -> None:
    for one in manager_of(resources)["http_filters"]:
        if "failure_mode_allow" in one["typed_config"] or "ext_proc" in one["name"]:
            one["typed_config"]["failure_mode_allow"] = True


def sends_no_bodies(resources: dict[str, Any]) -> None:
    for one in manager_of(resources)["http_filters"]:
        if "ext_proc" in one["name"]:
            one["typed_config"]["processing_mode"]["request_body_mode"] = "NONE"


def lacks_the_filter(resources: dict[str, Any]) -> None:
    manager = manager_of(resources)
    filters = manager["http_filters"]
    manager["http_filters"] = [one for one in filters if "ext_proc" not in one["name"]]


def lacks_a_worker(resources: dict[str, Any]) -> None:
    for one in resources["clusters"]:
        groups = one.get("load_assignment", {}).get("endpoints", [])
        if groups and len(groups[0]["lb_endpoints"]) == 2:
            del groups[0]["lb_endpoints"][1]


def never_retries(resources: dict[str, Any]) -> None:
    for host in manager_of(resources)["route_config"]["virtual_hosts"]:
        host.pop("retry_policy", None)
        for route in host["routes"]:
            route.get("route", {}).pop("retry_policy", None)


def rewrites(resources: dict[str, Any]) -> None:
    (host,) = manager_of(resources)["route_config"]["virtual_hosts"]
    usual = host["routes"][0]
    action = usual["route"] | {"prefix_rewrite": "/"}
    host["routes"].insert(0, usual | {"match": {"prefix": "/llm/"}, "route": action})


USAGE = {"accounting": {"responses": "usage"}}
CLASSES = {
    "policy": {"classes": {"header": "x-c", "default": "a", "of": [{"name": "a"}, {"name": "b"}]}}
}
PROBED = {"policy": {"probe_interval_ms": 500}}


@contextlib.asynccontextmanager
async def isolated(directory: Path) -> AsyncIterator[System]:
    secret = directory / "secret"
    secret.write_bytes(b"0123456789abcdef")
    changes = {"isolation": {"header": "x-tenant", "secret_file": str(secret)}}
    async with running(1, changes=changes, envoy_config=changed_envoy(fails_open)) as system:
        yield system


@contextlib.asynccontextmanager
async def with_tls(directory: Path, days: int, *, breaks: bool) -> AsyncIterator[System]:
    identities = Identities(directory)
    identities.renew(days)
    tls = identities.tls()
    files = {"certificate": tls.certificate, "key": tls.key}
    listen = f"127.0.0.1:{free_port()}"
    places = {name: f"127.0.0.1:{free_port()}" for name in ("listen", "admin")}
    router_tls = {"ca": str(identities.ca_file), "name": NAME}
    changes = {
        "extproc": {"listen": listen, "tls": files},
        "envoy": {**places, "router_tls": router_tls},
    }
    async with running(1, changes=changes) as system:
        if breaks:
            identities.key_file.write_bytes(b"no key")
        yield system


@contextlib.asynccontextmanager
async def broken_source(directory: Path) -> AsyncIterator[System]:
    file = directory / "workers.yaml"
    file.write_text("[]\n")
    async with running(1, changes={"discovery": {"file": str(file)}}) as system:
        file.write_text("workers: [{endpoint: ")
        yield system


@contextlib.asynccontextmanager
async def other_template(directory: Path) -> AsyncIterator[System]:
    file = directory / "template.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    async with running(1, chat_template=file) as system:
        yield system


def plays(directory: Path) -> Mapping[str, Callable[[], Play]]:
    """What is done in each row."""
    two = ["tests.system.operations.stand_ins", "name_of_two", "workers.test"]
    ahead = ["tests.system.operations.stand_ins", "clock_ahead"]
    return {
        "Nobody listens at the port of events": lambda: configured(events(nobody)),
        "The port of events is the engine's HTTP port": lambda: configured(events(http_port)),
        "The port of events is the replay's": lambda: configured(events(replays_port)),
        "The ports of events and replay are exchanged": lambda: configured(events(exchanged)),
        "One rank is configured as two": lambda: configured(events(second_rank)),
        "A worker's host name is not known": lambda: configured(events(name_of_nobody)),
        "A worker's host name leads to two addresses": lambda: configured(events(name_of_two), two),
        "Events are subscribed to under another topic": lambda: asked(
            events(another_topic), "feed-silent"
        ),
        "A relay leaves out the sequence numbers of events": relayed,
        "Two workers' events are exchanged": lambda: asked(
            swapped, "predictions-wrong", changes=USAGE
        ),
        "An engine caches no prefixes": lambda: running(2, prefix_caching=False),
        "Events were lost, and no replay is configured": lambda: losing(events(no_replay)),
        "Events were lost, and the replay port refuses connections": lambda: losing(
            events(refused_replay)
        ),
        "`block_size` is not the engine's": lambda: told(events(block_size)),
        "The router's clock is an hour ahead": lambda: told(lambda _: None, ahead),
        "The engine has another chat template": lambda: other_template(directory),
        "An adapter is loaded that is not configured": lambda: broken(
            ask_for_an_adapter, loras=("adapter",)
        ),
        "A worker is dead": lambda: broken(kill, changes=PROBED),
        "A worker hangs": lambda: broken(hang, changes=PROBED),
        "Valkey is away": lambda: configured(sharing),
        "Two routers share nothing": lambda: configured(two_routers),
        "The file of workers is broken": lambda: broken_source(directory),
        "The TLS key is overwritten by something else": lambda: with_tls(
            directory, 90, breaks=True
        ),
        "The TLS certificate ends in three days": lambda: with_tls(directory, 3, breaks=False),
        "Envoy fails open, with `isolation`": lambda: isolated(directory),
        "Envoy's cluster lacks a worker": lambda: broken(
            ask_many, changes=USAGE, envoy_config=changed_envoy(lacks_a_worker)
        ),
        "Envoy has no `ext_proc` filter": lambda: broken(
            ask_without_a_router, envoy_config=changed_envoy(lacks_the_filter)
        ),
        "Envoy rewrites paths, with `policy.classes`": lambda: broken(
            ask_under_a_prefix, changes=CLASSES, envoy_config=changed_envoy(rewrites)
        ),
        "Envoy sends no bodies": lambda: broken(
            ask_some, envoy_config=changed_envoy(sends_no_bodies)
        ),
        "Clients compress bodies": lambda: broken(ask_compressed),
        "Envoy does not retry": lambda: running(2, envoy_config=changed_envoy(never_retries)),
    }


async def faults_of(system: System) -> list[dict[str, str]]:
    async with system.session.get(f"{system.admin}/faults") as answer:
        found: list[dict[str, str]] = await answer.json()
        return found


async def is_shown(system: System, code: str) -> dict[str, str] | None:
    return next((one for one in await faults_of(system) if one["code"] == code), None)


async def assert_seen(system: System, code: str) -> None:
    """Every place of the running router shows the fault."""
    await until(lambda: is_shown(system, code), f"{code} is found")
    assert await system.metric(f'kvsteer_faults{{code="{code}"}}') >= 1

    async def everywhere() -> str:
        fault = await is_shown(system, code)
        assert fault is not None
        said = fault["says"]
        async with system.session.get(f"{system.metrics}/readyz") as answer:
            if said not in await answer.text():
                return ""
        at = system.metrics.removeprefix("http://")
        lines = await asyncio.to_thread(faults_at, at, 5.0)
        if not any(said[:200] in line for line in lines):
            return ""
        screen = io.StringIO()
        await asyncio.to_thread(top.run, system.admin, once=True, out=screen)
        return said if f"FAULT {fault['subject']}: {said}"[:190] in screen.getvalue() else ""

    await until(everywhere, f"readyz, health and top say the same of {code}")


async def doctors_codes(system: System) -> dict[str, str]:
    """What the doctor finds wrong, with what to do."""
    config = load(str(system.config_file))
    found = await examine(config, DOCTOR_SECONDS, probes=False, bounds=BRIEF)
    return {one.code: one.fix for one in found if one.verdict is Severity.WRONG}


@pytest.fixture(autouse=True)
def silent_sockets() -> Any:
    yield
    while SILENT:
        SILENT.pop().close()


@pytest.mark.slow
@pytest.mark.parametrize("what", sorted(documented()))
async def test_misoperation_is_named_wherever_the_table_says(what: str, tmp_path: Path) -> None:
    row = documented()[what]
    play = {name.replace("`", ""): one for name, one in plays(tmp_path).items()}[what]
    async with play() as system:
        if row.fault:
            await assert_seen(system, row.fault)
        if row.log:
            await until(lambda: row.log in system.log.read_text(), f"the log says {row.log}")
        found = await doctors_codes(system)
        # what the doctor sees only while a batch passes it may have from the router alone
        assert found.get(row.doctor) or found.get(row.fault), found
        assert row.alert == "" or re.search(rf"alert: {row.alert}\n", RULES)


def test_every_row_is_played_and_agrees_with_the_list_of_faults() -> None:
    rows = documented()
    assert sorted(name.replace("`", "") for name in plays(ROOT)) == sorted(rows)
    assert len(rows) >= 20
    for row in rows.values():
        assert not row.fault or row.alert == KINDS[row.fault].alert


@pytest.mark.slow
async def test_dead_router_is_named_by_health_doctor_and_top() -> None:
    async with running(1) as system:
        await system.stop_router()
        assert "router-down" in await doctors_codes(system)
        at = load(str(system.config_file)).extproc.listen
        assert "no router listens there" in str(await asyncio.to_thread(fault_of, at))
        with pytest.raises(Exception, match="no router runs there"):
            await asyncio.to_thread(top.run, system.admin, once=True, out=io.StringIO())
