from extproc.http2.outbox import Http2Stream


def test_new_stream_is_open_on_both_sides() -> None:
    one = Http2Stream(1, 100, 5)
    assert (one.id, one.window, one.expected, one.received) == (1, 100, 5, 0)
    assert [one.is_received, one.is_used] == [False] * 2
    assert (one.queued, one.credit, one.unreturned) == (0, 0, 0)
