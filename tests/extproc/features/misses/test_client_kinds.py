import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.features.misses.client_kinds import MOST_KINDS, OTHERS, UNNAMED, ClientKinds


@pytest.mark.parametrize(
    ("agent", "kind"),
    [
        (b"claude-cli/2.1.0 (external, cli)", "claude-cli"),
        (b"Codex_CLI_rs/0.5 (Linux)", "codex_cli_rs"),
        (b"opencode", "opencode"),
        (b"curl/8.5.0", "curl"),
        (b"(odd)", UNNAMED),
        (b"x" * 40, UNNAMED),
        (b"", UNNAMED),
    ],
)
def test_kind_is_the_first_product_of_the_user_agent(agent: bytes, kind: str) -> None:
    assert ClientKinds().kind_of([agent]) == kind


@given(st.lists(st.binary(max_size=40), max_size=3 * MOST_KINDS))
def test_kinds_are_bounded_whatever_clients_say(agents: list[bytes]) -> None:
    kinds = ClientKinds()
    seen = {kinds.kind_of([agent]) for agent in agents} | {kinds.kind_of([])}
    assert len(seen) <= MOST_KINDS + 2


def test_first_kinds_that_come_are_told_apart() -> None:
    kinds = ClientKinds()
    for number in range(MOST_KINDS):
        kinds.kind_of([b"agent%d/1" % number])
    assert kinds.kind_of([b"late/1"]) == OTHERS
    assert kinds.kind_of([b"agent0/2"]) == "agent0"
