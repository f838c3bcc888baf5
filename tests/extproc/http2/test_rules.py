"""Every rule of RFC 9113, broken at a session and at its oracle."""

from struct import Struct

import pytest

from extproc.http2.limits import Limits
from tests.extproc.http2.pair import Pair
from tests.extproc.http2.peer import frames_of, resets
from tests.oracles.http2.frames import FrameType
from tests.system.attacks.peer import GREETING
from tests.system.attacks.rules import PREFACES, RULES, Rule


def goaways(sent: bytes) -> list[int]:
    """The codes that end the connection."""
    frames = [one for one in frames_of(sent) if one.kind == FrameType.GOAWAY]
    return [Struct(">I").unpack(one.payload[4:8])[0] for one in frames]


@pytest.mark.parametrize("rule", [*RULES, *PREFACES], ids=str)
def test_broken_rule_is_answered_with_its_error_code(rule: Rule) -> None:
    pair = Pair(Limits(), 2**20, 2**30)
    pair.receive(b"" if rule in PREFACES else GREETING)
    pair.receive(rule.before)
    sent = pair.receive(rule.sent)
    assert goaways(sent) == ([] if rule.goaway is None else [rule.goaway])
    assert (pair.both[0].fault is None) == (rule.goaway is None)
    found = [code for stream, code in resets(frames_of(sent)) if stream == 1]
    assert rule.goaway is not None or found == ([] if rule.reset is None else [rule.reset])
