"""POST /probe over real sockets: who may ask, what is refused, and that nothing is left behind."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.admin.probe import ProbeLimits, token_in
from extproc.base.errors import StartError
from tests.extproc.admin.probed import (
    BODY,
    CONFIG,
    IDS,
    SECRET,
    SIZE,
    TOKEN,
    Probed,
    body_of,
    probing,
)

PATH = ("path", "/v1/completions")
SHORT = body_of(range(4))
ZEROS = {"device": 0, "host": 0, "disk": 0, "remote": 0}


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    return f"{CONFIG}\nisolation: {{header: x-tenant, secret_file: '{secret}'}}"


async def test_probe_says_what_the_pick_holds_and_how_long_it_takes() -> None:
    async with probing() as one:
        cold = await one.model()
        await one.store(1, IDS)
        warm = await one.model()
    assert (cold["pick"]["share"], cold["pick"]["certain_tokens"]) == (0, ZEROS)
    assert warm["pick"]["certain_tokens"] == {**ZEROS, "device": 64 * SIZE}
    assert (warm["model"], warm["prompt_tokens"], warm["verdict"]) == ("m", len(IDS), "steer")
    assert (warm["keyed"], warm["reason"], warm["best"]) == (True, "", None)
    assert warm["pick"]["prefill_seconds"] < cold["pick"]["prefill_seconds"]
    assert warm["pick"]["share"] == round(64 * SIZE / len(IDS), 4)


async def test_probe_shows_the_warmest_worker_beside_the_pick_that_is_not_busy() -> None:
    async with probing() as one:
        await one.store(0, IDS)
        one.workers.loads.begin("127.0.0.1:1", 400_000.0, one.workers.monotonic())
        shown = await one.model()
    assert shown["pick"]["share"] == shown["pick"]["queue_seconds"] == 0
    assert shown["best"]["share"] > 0.9
    assert 40 < shown["best"]["queue_seconds"] <= 50


async def test_probe_books_counts_and_notes_nothing() -> None:
    async with probing() as one:
        await one.route(BODY)
        before = one.accounts()
        answers = [await one.model() for _ in range(3)]
        assert one.accounts() == before
    assert answers[0]["pick"]["speculative_tokens"] == answers[2]["pick"]["speculative_tokens"] > 0


async def test_probe_names_no_worker_address_or_secret() -> None:
    async with probing() as one:
        await one.store(0, IDS)
        _, answer = await one.ask()
    assert "127.0.0.1" not in str(answer)
    assert set(answer["models"][0]) == {
        "model", "prompt_tokens", "keyed", "reason", "verdict", "pick", "best",
    }  # fmt: skip


@pytest.mark.parametrize(
    "token", [None, "", "another-token-of-some-length", f"{TOKEN}x", TOKEN[:-1]]
)
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_probe_without_its_token_is_refused_whatever_is_asked(
    token: str | None, method: str
) -> None:
    async with probing() as one:
        status, answer = await one.ask(token=token, method=method)
        unknown, _ = await one.ask(query=[("path", "/x")], token=token)
        assert one.counted() == {"unauthorized": 2}
    assert (status, unknown, answer) == (401, 401, {"error": "want the token of probe.token_file"})


async def test_probe_refuses_another_scheme_and_two_tokens() -> None:
    async with probing() as one:
        basic = await one.ask(token=None, headers={"Authorization": f"Basic {TOKEN}"})
        sent = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer x")]
        async with one.client.post(one.url, data=BODY, headers=sent) as response:
            assert (basic[0], response.status) == (401, 401)


@pytest.mark.parametrize(
    ("body", "query", "status", "says"),
    [
        (b"x" * 2_000, [PATH], 413, "exceeded"),
        (SHORT.replace(b'"m"', b'"x"'), [PATH], 404, "no model is named that is known here"),
        (SHORT, [PATH, ("model", "nobody")], 404, "no model is named that is known here"),
        (SHORT, [("path", "/healthz")], 400, "by this one no model is called"),
        (SHORT, [PATH, *[("model", str(n)) for n in range(9)]], 400, "more than 8"),
        (b"{" * 900, [PATH], 404, "no model is named"),
        (b"\xff\xfe" + b"[" * 800, [PATH], 404, "no model is named"),
        (b"", [PATH], 404, "no model is named"),
    ],
)
async def test_probe_refuses_what_is_beyond_its_bounds(
    body: bytes, query: list[tuple[str, str]], status: int, says: str
) -> None:
    async with probing(limits=ProbeLimits(body_bytes=1_000)) as one:
        found, answer = await one.ask(body, query)
        assert one.counted() == {"refused": 1}
    assert found == status
    assert says in answer["error"]


HOSTILE = [
    b'{"model":"m","prompt":' + b"[" * 200_000,
    b'{"model":"m","prompt":[' + b"1," * 400_000 + b"1]}",
    b'{"model":"m","prompt":[' + b"9" * 100_000 + b"]}",
    b'{"model":"m","prompt":"\xff\xfe\x00"}',
    b'{"model":"m",' * 50_000,
    b'{"model":"m","model":' + b'{"model":' * 50_000,
    '{"model":"m","prompt":[1]}'.encode("utf-16"),
    b"\x1f\x8b" + b"x" * 4_096,
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("models", [[], ["m", "n"]])
async def test_hostile_body_is_answered_and_breaks_nothing(
    body: bytes, models: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with probing() as one:
        status, answer = await one.ask(body, [PATH, *[("model", name) for name in models]])
        assert (await one.ask())[0] == 200
    assert status in (200, 404)
    assert len(answer.get("models", ())) in (0, max(1, len(models)))
    assert not [one for one in caplog.records if one.levelname in ("ERROR", "CRITICAL")]


async def test_probe_refuses_a_long_body_without_a_length_and_a_compressed_one() -> None:
    async def pieces() -> Any:
        for _ in range(50):
            yield b"x" * 100

    sent = {"Authorization": f"Bearer {TOKEN}"}
    async with probing(limits=ProbeLimits(body_bytes=1_000)) as one:
        async with one.client.post(one.url, data=pieces(), headers=sent) as response:
            assert response.status == 413
        zipped = await one.ask(b"{}", headers={"Content-Encoding": "gzip"})
    assert zipped == (415, {"error": "the body must not be compressed"})


async def test_probe_beyond_the_most_at_once_is_told_to_come_again() -> None:
    async def slow() -> Any:
        yield b"{"
        await ended.wait()

    ended, sent = asyncio.Event(), {"Authorization": f"Bearer {TOKEN}"}
    async with probing(limits=ProbeLimits(concurrent=1)) as one:
        held = asyncio.create_task(one.client.post(one.url, data=slow(), headers=sent).__aenter__())
        status = 200
        while status == 200:
            status, answer = await one.ask()
        ended.set()
        (await held).close()
        assert (status, answer["error"]) == (429, "too many probes at once")
        assert (await one.ask())[0] == 200


async def test_probe_whose_body_does_not_come_is_given_up() -> None:
    async def stuck() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    sent = {"Authorization": f"Bearer {TOKEN}"}
    async with probing(limits=ProbeLimits(read_seconds=0.05)) as one:
        async with one.client.post(one.url, data=stuck(), headers=sent) as response:
            assert response.status == 408
        assert (await one.ask())[0] == 200


async def test_probe_asks_each_named_model_for_the_same_prompt() -> None:
    async with probing() as one:
        await one.store(0, IDS)
        status, answer = await one.ask(query=[PATH, ("model", "m"), ("model", "n")])
    assert status == 200
    shares = {each["model"]: each["pick"]["share"] for each in answer["models"]}
    assert shares == {"m": round(64 * SIZE / len(IDS), 4), "n": 0}


async def test_probe_says_why_a_prompt_is_not_keyed() -> None:
    chat = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    async with probing() as one:
        status, answer = await one.ask(chat, query=[])
    (shown,) = answer["models"]
    assert (status, shown["keyed"], shown["reason"]) == (200, False, "no_tokenizer")
    assert shown["pick"]["share"] == 0


async def test_probe_shows_a_tenant_its_own_cache_alone(tenants: str) -> None:
    async with probing(tenants) as one:
        await one.store(0, IDS, b"a")
        own, other = await one.model(tenant="a"), await one.model(tenant="b")
        nobody = await one.model()
    assert own["pick"]["share"] > 0.9
    assert other["pick"]["share"] == 0
    assert other["best"] is None
    assert (nobody["verdict"], nobody["status"]) == ("refused", 403)
    assert nobody["message"] == "the request does not name one tenant"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from([b"b", b"c", None]), st.integers(1, 64)),
        max_size=6,
    ),
    st.integers(0, 40),
)
async def test_answer_does_not_depend_on_what_other_tenants_cached(
    tenants: str, others: list[tuple[int, bytes | None, int]], own_blocks: int
) -> None:
    async with probing(tenants) as one:
        if own_blocks:
            await one.store(0, IDS[: own_blocks * SIZE + 1], b"a")
        before = await _asked(one)
        for worker, tenant, blocks in others:
            await one.store(worker, IDS[: blocks * SIZE + 1], tenant)
        assert await _asked(one) == before


async def _asked(one: Probed) -> list[dict[str, Any]]:
    """What a tenant is told of its prompt, with a guessed salt too, and for another model."""
    headers = {"x-tenant": "a"}
    query = [PATH, ("model", "m"), ("model", "n")]
    plain, guessed = body_of(), body_of(cache_salt="b")
    return [(await one.ask(body, query, headers=headers))[1] for body in (plain, guessed)]


def test_token_that_no_header_can_have_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"sixteen or more bytes, with spaces")
    with pytest.raises(StartError, match="printable ASCII without spaces"):
        token_in(str(file))
    file.write_bytes(b"too short")
    with pytest.raises(StartError, match="has 9 bytes; 16 are the least"):
        token_in(str(file))
    file.write_text(f"{TOKEN}\n")
    assert token_in(str(file)) == TOKEN.encode()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=64))
def test_token_is_what_a_header_can_have_whatever_is_in_the_file(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    try:
        token = token_in(str(file))
    except StartError:
        return
    assert len(token) >= 16
    assert token.decode("ascii").isprintable()
    assert not token.split()[1:]
