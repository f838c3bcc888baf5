"""The headers of a request that somebody asks about."""

from extproc.admin.asked import HeaderNames, asked

NAMES = HeaderNames("x-policy", ("session-id", "x-session-id"), ("x-talk",), ("x-tenant",))


def test_headers_count_in_any_case_and_trusted_ones_with_all_their_values() -> None:
    fields = [
        ("X-Policy", "random"),
        ("X-Session-Id", "second"),
        ("Session-ID", ""),
        ("X-Talk", "t"),
        ("x-tenant", "a"),
        ("X-Tenant", "b"),
        ("X-Tenant", ""),
    ]
    head, named = asked("/v1/chat/completions?x=1", fields, NAMES, 7)
    assert (head.method, head.path, head.content_length) == ("POST", "/v1/chat/completions", 7)
    assert (head.policy, head.session, head.conversation) == ("random", "second", "t")
    assert named == {"x-tenant": [b"a", b"b"]}


def test_headers_that_are_not_sent_are_absent() -> None:
    head, named = asked("/v1/completions", [], NAMES)
    assert (head.policy, head.session, head.conversation) == (None, "", "")
    assert named == {"x-tenant": []}
    assert asked("/", [("x-policy", "p")], NAMES._replace(policy=None))[0].policy is None


def test_trusted_value_keeps_bytes_that_are_no_text() -> None:
    _, named = asked("/", [("x-tenant", b"\xff".decode(errors="surrogateescape"))], NAMES)
    assert named == {"x-tenant": [b"\xff"]}
