"""Discovery against an API server that lists, watches, times out, forgets and disappears."""

import contextlib
import functools
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import StartError
from extproc.config.reader import parse
from extproc.config.schema import Config
from extproc.fleet.discovery.discovery import Discovery
from extproc.fleet.discovery.kubernetes import KubernetesPods
from extproc.fleet.discovery.list_watch import USUAL, WatchLimits
from extproc.fleet.discovery.pods import PAGE
from extproc.fleet.discovery.view import Fleet
from tests.extproc.fleet.discovery.api_server import NAMESPACE, ApiServer, api_server, pod
from tests.extproc.fleet.discovery.following import Seen, following
from tests.waiting import until

HASTY = WatchLimits(wait_seconds=(0.01, 0.05))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, str]]:
    async with api_server(tmp_path) as one:
        yield one


def config(kubeconfig: str, which: str = "selector: app=vllm") -> Config:
    options = f"{{{which}, namespace: {NAMESPACE}, kubeconfig: {kubeconfig}}}"
    return parse(f"models: [{{name: a}}]\ndiscovery: {{kubernetes: {options}}}", "c")


def pods(kubeconfig: str, which: str = "selector: app=vllm", **limits: Any) -> KubernetesPods:
    """A source that tries again at once; limits: those in which it differs from `HASTY`."""
    made = config(kubeconfig, which)
    assert made.discovery.kubernetes is not None
    return KubernetesPods(made.discovery.kubernetes, made, replace(HASTY, **limits))


@contextlib.asynccontextmanager
async def discovered(source: KubernetesPods) -> AsyncIterator[Discovery]:
    async def apply(_: Fleet) -> None:
        pass

    one = Discovery((), [source])
    await one.start(apply)
    yield one
    await one.close()


def workers_of(one: Discovery) -> int | None:
    (shown,) = (source for source in one.status() if source["source"] == "kubernetes")
    number: int | None = shown["workers"]
    return number


def names(one: Discovery, number: int) -> bool:
    return workers_of(one) == number


def logged(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def pool(name: str = "llm", app: str = "vllm", ports: tuple[int, ...] = (8000,)) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {
            "selector": {"matchLabels": {"app": app}},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "kvsteer"},
        },
    }


async def test_pods_are_listed_then_watched(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one", "10.0.0.1"))
    api.put("pods", pod("other", "10.0.0.9", labels={"app": "else"}))
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: seen.endpoints == ["10.0.0.1:8000"])
        await until(lambda: api.watches == 1)
        api.put("pods", pod("two", "10.0.0.2"))
        await until(lambda: seen.endpoints == ["10.0.0.1:8000", "10.0.0.2:8000"])
        api.delete("pods", "one")
        await until(lambda: seen.endpoints == ["10.0.0.2:8000"])
        assert (api.lists(), seen.faults) == (1, [])


async def test_long_list_is_read_in_pages(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    api.page = 2
    for number in range(5):
        api.put("pods", pod(f"p{number}", f"10.0.0.{number}"))
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: len(seen.endpoints or ()) == 5)
        assert [query.get("continue") for query in api.asked[:3]] == [None, "2", "4"]


async def test_page_beyond_the_requested_size_is_a_fault(
    server: tuple[ApiServer, str],
) -> None:
    api, kubeconfig = server
    api.page = PAGE + 1
    for number in range(PAGE + 1):
        api.put("pods", pod(f"p{number}", "10.0.0.1"))
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: seen.fault == "the API server's answer is no list")
        assert seen.endpoints is None


async def test_endless_list_is_a_fault(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    api.lists_without_end = True
    async with following(pods(kubeconfig, max_pages=5)) as seen:
        await until(lambda: seen.fault == "a list has more than 5 pages")


async def test_readiness_and_termination_are_honoured(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one", ready=False))
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: seen.views == 1)
        assert seen.found("10.0.0.1:8000").excluded == "its pod is not ready"
        await until(lambda: api.watches == 1)
        api.put("pods", pod("one"))
        await until(lambda: not seen.found("10.0.0.1:8000").excluded)
        api.put("pods", pod("one", deleted=True))
        await until(lambda: seen.found("10.0.0.1:8000").worker.draining)
        api.put("pods", pod("one", phase="Succeeded"))
        await until(lambda: seen.endpoints == [])


async def test_watch_that_times_out_continues_from_the_last_bookmark(
    server: tuple[ApiServer, str],
) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one"))
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: api.watches == 1)
        confirmed = seen.confirmed
        api.bookmark("pods")
        await until(lambda: seen.confirmed > confirmed)
        api.end_watches()
        version = str(api.version)
        await until(lambda: api.asked[-1].get("resourceVersion") == version)
        assert (api.lists(), seen.views) == (1, 1)


@pytest.mark.parametrize("as_status", [True, False])
async def test_expired_version_is_listed_again(
    server: tuple[ApiServer, str], *, as_status: bool
) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one", "10.0.0.1"))
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: api.watches == 1)
        del api.pods["one"]  # no event is sent
        api.pods["two"] = pod("two", "10.0.0.2")
        api.gone_as_status = as_status
        api.version += 5
        api.gone_below = api.version
        api.end_watches()
        await until(lambda: seen.endpoints == ["10.0.0.2:8000"])
        assert api.lists() == 2


async def test_expired_version_is_listed_again_at_once(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    async with following(
        pods(kubeconfig, wait_seconds=(3600.0, 3600.0), list_helps_seconds=0.0)
    ) as seen:
        await until(lambda: api.watches == 1)
        api.pods["two"] = pod("two", "10.0.0.2")
        gone = {"kind": "Status", "code": 410, "reason": "Expired"}
        api.emit("pods", "ERROR", gone)
        await until(lambda: seen.endpoints == ["10.0.0.2:8000"])


async def test_repeated_lists_without_effect_grow_rarer(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    api.gone_below = 10**9
    async with following(pods(kubeconfig)):
        await until(lambda: len(api.listed_at) > 5)
    pauses = [later - at for at, later in pairwise(api.listed_at)]
    for paused, nominal in zip(pauses, (0.01, 0.02, 0.04, 0.08, 0.16), strict=False):
        assert paused >= nominal / 2


async def test_last_view_stays_during_an_outage(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one"))
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: api.watches == 1)
        await api.stop()
        await until(lambda: len(seen.faults) > 3)
        assert seen.endpoints == ["10.0.0.1:8000"]
        assert seen.fault.startswith("the API server does not answer: ")
        api.put("pods", pod("two", "10.0.0.2"))
        api.gone_below = api.version
        await api.start()
        await until(lambda: seen.endpoints == ["10.0.0.1:8000", "10.0.0.2:8000"])
        assert seen.fault == ""


async def go_away(api: ApiServer, seen: Seen) -> None:
    await until(lambda: api.watches == 1)
    await api.stop()
    await until(lambda: bool(seen.fault))


async def test_view_is_confirmed_only_by_a_new_list_after_an_outage(
    server: tuple[ApiServer, str],
) -> None:
    api, kubeconfig = server
    api.put("pods", pod("gone"))
    async with following(pods(kubeconfig)) as seen:
        await go_away(api, seen)
        api.delete("pods", "gone")
        api.gone_below = api.version
        confirmed = seen.confirmed
        await api.start()
        await until(lambda: seen.confirmed > confirmed)
        assert (seen.endpoints, seen.fault) == ([], "")


async def test_quiet_watch_confirms_the_view_before_any_bookmark(
    server: tuple[ApiServer, str],
) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one"))
    async with following(pods(kubeconfig)) as seen:
        await go_away(api, seen)
        await api.start()
        await until(lambda: not seen.fault)
        assert (api.lists(), seen.views, api.watches) == (1, 1, 1)


async def test_hung_server_and_its_return_are_noticed_within_seconds(
    tmp_path: Path,
) -> None:
    async with api_server(tmp_path) as (api, kubeconfig), following(pods(kubeconfig)):
        await until(lambda: api.watches == 1)
        limit = float(api.asked[-1]["timeoutSeconds"])
    assert limit + USUAL.patience_seconds <= 15
    assert 1.5 * USUAL.wait_seconds[1] + USUAL.connect_seconds <= 15


@pytest.mark.parametrize("status", [401, 403, 500, 503])
async def test_refusal_is_a_fault_until_it_ends(server: tuple[ApiServer, str], status: int) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one"))
    api.refuses = status
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: seen.fault == f"the API server: {status} not now")
        api.refuses = None
        await until(lambda: seen.endpoints == ["10.0.0.1:8000"])


async def test_silent_server_is_a_fault(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    api.hang()
    async with following(pods(kubeconfig, list_seconds=0.2)) as seen:
        await until(lambda: "it said nothing in time" in seen.fault)


async def test_hanging_watch_is_a_fault_until_the_server_continues(
    server: tuple[ApiServer, str],
) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one"))
    async with following(pods(kubeconfig, watch_seconds=1, patience_seconds=1.0)) as seen:
        await until(lambda: api.watches == 1)
        api.hang()
        await until(lambda: "it said nothing in time" in seen.fault)
        assert seen.endpoints == ["10.0.0.1:8000"]
        api.wake()
        await until(lambda: not seen.fault)
        assert api.lists() == 1


async def test_watch_that_reaches_its_limit_continues_without_a_fault_or_a_list(
    server: tuple[ApiServer, str],
) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one"))
    async with following(pods(kubeconfig, watch_seconds=1)) as seen:
        await until(lambda: sum("watch" in query for query in api.asked) > 2)
        assert (api.lists(), seen.endpoints, seen.faults) == (1, ["10.0.0.1:8000"], [])


@pytest.mark.parametrize(
    "data", [b"no event\n", b"[]\n", b'{"type": "ERROR", "object": {"code": 500}}\n', b"x" * 5000]
)
async def test_malformed_watch_event_is_a_fault(server: tuple[ApiServer, str], data: bytes) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one"))
    async with following(pods(kubeconfig, max_line_bytes=4096)) as seen:
        await until(lambda: api.watches == 1)
        api.send("pods", data)
        await until(lambda: len(seen.faults) == 1)
        await until(lambda: api.watches == 1)
        api.put("pods", pod("two", "10.0.0.2"))
        await until(lambda: len(seen.endpoints or ()) == 2)


async def test_pods_beyond_the_limit_are_a_fault_until_they_are_fewer(
    server: tuple[ApiServer, str],
) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one", "10.0.0.1"))
    async with following(pods(kubeconfig, max_things=1)) as seen:
        await until(lambda: api.watches == 1)
        api.put("pods", pod("two", "10.0.0.2"))
        await until(lambda: seen.faults.count("there are more than 1 objects") > 1)
        assert (seen.fault, seen.endpoints) == ("there are more than 1 objects", ["10.0.0.1:8000"])
        api.delete("pods", "one")
        await until(lambda: seen.endpoints == ["10.0.0.2:8000"])


async def test_note_names_the_first_of_many_wrong_pods(
    server: tuple[ApiServer, str],
) -> None:
    api, kubeconfig = server
    for number in range(9):
        api.put("pods", pod(f"p{number}", f"10.0.0.{number}", annotations={"kvsteer.io/port": "x"}))
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: len(seen.endpoints or ()) == 9)
        assert seen.note.startswith("pod p0: ")
        assert seen.note.endswith("; and 4 more")


async def test_unreadable_pod_spoils_no_other(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    bad = pod("bad")
    bad["status"] = "what"
    api.put("pods", bad)
    api.put("pods", pod("good", "10.0.0.2"))
    async with following(pods(kubeconfig)) as seen:
        await until(lambda: seen.endpoints == ["10.0.0.2:8000"])
        await until(lambda: api.watches == 1)
        api.put("pods", bad)
        api.put("pods", pod("more", "10.0.0.3"))
        await until(lambda: seen.endpoints == ["10.0.0.2:8000", "10.0.0.3:8000"])


async def test_pool_selects_pods_and_ports(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one"))
    api.put("pods", pod("new", "10.0.0.2", labels={"app": "new"}))
    async with following(pods(kubeconfig, "inference_pool: llm")) as seen:
        await until(lambda: seen.fault == "InferencePool llm does not exist")
        await until(lambda: api.watches == 1)
        api.put("pools", pool(ports=(8000, 8001)))
        await until(lambda: seen.endpoints == ["10.0.0.1:8000", "10.0.0.1:8001"])
        api.put("pools", pool(app="new"))
        await until(lambda: seen.endpoints == ["10.0.0.2:8000"])
        assert any(query.get("fieldSelector") == "metadata.name=llm" for query in api.asked)


async def test_pods_of_a_pool_stay_when_the_pool_vanishes_or_breaks(
    server: tuple[ApiServer, str],
) -> None:
    api, kubeconfig = server
    api.put("pods", pod("one"))
    api.put("pools", pool())
    async with following(pods(kubeconfig, "inference_pool: llm")) as seen:
        await until(lambda: seen.endpoints == ["10.0.0.1:8000"])
        await until(lambda: api.watches == 2)
        api.put("pools", pool(ports=()))
        await until(lambda: seen.fault == "InferencePool llm does not have 1 to 8 ports")
        api.delete("pools", "llm")
        await until(lambda: seen.fault == "InferencePool llm does not exist")
        api.put("pods", pod("two", "10.0.0.2"))
        await until(lambda: len(seen.endpoints or ()) == 2)
        assert seen.fault == "InferencePool llm does not exist"
        api.put("pools", pool())
        await until(lambda: seen.fault == "")


@contextlib.asynccontextmanager
async def a_pool_and_its_pod(
    server: tuple[ApiServer, str], caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[ApiServer, Discovery]]:
    """Follows a pool and its pod, with the log at INFO."""
    caplog.set_level(logging.INFO, "kvsteer")
    api, kubeconfig = server
    api.put("pods", pod("one"))
    api.put("pools", pool())
    async with discovered(pods(kubeconfig, "inference_pool: llm")) as one:
        await until(lambda: workers_of(one) == 1 and api.watches == 2)
        yield api, one


async def test_fault_of_a_pool_is_logged_once(
    server: tuple[ApiServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with a_pool_and_its_pod(server, caplog) as (api, one):
        api.delete("pools", "llm")
        await until(lambda: bool(one.fault("kubernetes")))
        for number in range(2, 5):  # the pods are fine
            api.put("pods", pod(f"p{number}", f"10.0.0.{number}"))
            await until(functools.partial(names, one, number))
        assert one.fault("kubernetes") == "InferencePool llm does not exist"
        api.put("pools", pool())
        await until(lambda: not one.fault("kubernetes"))
    assert logged(caplog, "does not exist") == logged(caplog, "works again") == 1


async def test_refusal_of_pools_alone_is_logged_once(
    server: tuple[ApiServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with a_pool_and_its_pod(server, caplog) as (api, one):
        api.refuses, api.refuses_kind = 403, "pools"
        api.end_watches()
        asked = len(api.asked)
        await until(lambda: len(api.asked) > asked + 5 and api.watches == 1)
        api.bookmark("pods")
        assert one.fault("kubernetes") == "the API server: 403 not now"
        api.refuses = None
        await until(lambda: not one.fault("kubernetes"))
    assert logged(caplog, "403 not now") == logged(caplog, "works again") == 1


async def test_refusal_of_pods_and_pools_is_logged_once(
    server: tuple[ApiServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with a_pool_and_its_pod(server, caplog) as (api, one):
        api.refuses = 503
        api.end_watches()
        asked = len(api.asked)
        await until(lambda: len(api.asked) > asked + 5)
        api.refuses = None
        await until(lambda: not one.fault("kubernetes"))
    assert logged(caplog, "503 not now") == logged(caplog, "works again") == 1


async def test_missing_kubeconfig_is_a_fault(tmp_path: Path) -> None:
    async with following(pods(str(tmp_path / "none"))) as seen:
        await until(lambda: seen.fault.startswith("the API server is not known: "))


def test_start_error_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(StartError, match=r"pip install '.\[kubernetes\]' in a clone"):
        pods("none")
