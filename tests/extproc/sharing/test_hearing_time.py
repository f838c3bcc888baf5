"""What other routers' messages may take of a router's time, and have it send."""

from extproc.sharing.hearing_time import HearingTime


def test_what_is_sent_in_reply_counts_as_time() -> None:
    hearing = HearingTime()
    sent = 0

    def reply() -> None:
        nonlocal sent
        sent += 48 * 1024
        hearing.note_sent(48 * 1024)

    while not hearing.spend(1.0, reply):
        assert sent < 4 * 2**20, "in a tenth of a second"
    assert sent > 2**20
    assert hearing.spend(1.2, lambda: None) == 0.0, "in the next window"
