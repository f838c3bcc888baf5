from kvstate.errors import MAX_PEER_TEXT, ReplayError, WireError, printable


def test_printable_removes_line_breaks_and_escapes_of_a_peer() -> None:
    forged = "busy\n2026-11-22 ERROR kvsteer: all is lost\x1b[2J"
    shown = "busy 2026-11-22 ERROR kvsteer: all is lost?[2J"
    assert printable(forged) == str(WireError(forged)) == str(ReplayError(forged)) == shown


def test_printable_cuts_long_texts_of_a_peer() -> None:
    long = "x" * 40_000_000
    assert len(printable(long)) == len(str(WireError(long))) == MAX_PEER_TEXT
    assert printable(long).endswith("xxx...")
    assert printable("x" * MAX_PEER_TEXT) == "x" * MAX_PEER_TEXT
    assert printable("abcdef", 5) == "ab..."
