from prometheus_client import CollectorRegistry

from extproc.features.misses.change import Kind
from extproc.features.misses.last_prompts import LastPrompts
from extproc.features.misses.miss_figures import MissFigures
from extproc.features.misses.partition import Held
from extproc.features.misses.sender import Sender
from extproc.features.misses.totals import MOST_SENDERS, OTHERS, Totals
from extproc.features.misses.verdicts import Change, Verdict

CLOCK = Change(212, "system", 0, "system", Kind.TIME)


def test_tokens_that_were_lost_are_no_change_of_the_client() -> None:
    totals = Totals()
    totals.count(Verdict(1, 0.0, "", Sender("m", "codex", ""), "w", 1, 2, Held(90, 0, 1, 80, 80)))
    assert totals.as_json()["breaks"] == []
    assert totals.tokens() == {"unknown": 80, "new": 10}


def verdict(client: str, reused: int = 208, tenant: str = "") -> Verdict:
    held = Held(9_000, reused, 16, last=8_000, kept=8_000 if reused > 7_000 else 212)
    change = None if reused > 7_000 else CLOCK
    return Verdict(1, 0.0, "", Sender("m", client, tenant), "w", 1, 2, held, change, seconds=0.001)


def test_who_wastes_most_comes_first_with_its_price() -> None:
    totals = Totals(price=3.6)
    totals.count(verdict("codex", 8_000))
    totals.count(verdict("claude-cli"))
    shown = totals.as_json()
    worst, best = shown["clients"]
    assert (worst["client"], worst["again_seconds"], worst["again_price"]) == (
        "claude-cli", 7.788, 0.0078
    )  # fmt: skip
    assert (best["saved_seconds"], best["again_seconds"]) == (8.0, 0.0)
    (found,) = shown["breaks"]
    assert found["says"].startswith("100% of the tokens computed again come from claude-cli")
    assert sum(shown["tokens"].values()) == 18_000
    assert totals.sentences()[0] == (
        "of 18,000 prompt tokens since the start 46% were reused and 43% computed again"
    )
    assert totals.sentences()[1] == found["says"]
    assert Totals().as_json()["clients"] == []
    assert Totals().sentences() == []


def test_too_many_senders_count_as_one() -> None:
    totals = Totals()
    for number in range(MOST_SENDERS + 3):
        totals.count(verdict("agent", tenant=f"{number:08x}"))
    shown = totals.as_json()["clients"]
    assert len(shown) == MOST_SENDERS + 1
    (others,) = [one for one in shown if one["client"] == OTHERS]
    assert (others["turns"], others["again_price"]) == (3, None)


def test_metrics_tell_clients_apart_and_no_tenants() -> None:
    totals = Totals()
    for tenant in ("0badcafe", "deadbeef"):
        totals.count(verdict("claude-cli", tenant=tenant))
    totals.ways["examined"] += 1
    registry = CollectorRegistry()
    registry.register(MissFigures(totals, LastPrompts(1)))
    labels = {"model": "m", "client": "claude-cli"}
    changed = {**labels, "cause": "changed"}
    assert registry.get_sample_value("kvsteer_turn_tokens_total", changed) == 2 * 7_788
    assert registry.get_sample_value("kvsteer_again_seconds_total", labels) == 2 * 7.788
    assert registry.get_sample_value("kvsteer_turn_verdicts_total", {"way": "examined"}) == 1
    assert registry.get_sample_value("kvsteer_last_prompts") == 0
    assert registry.get_sample_value("kvsteer_last_prompts_bytes") == 0
