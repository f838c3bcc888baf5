"""What has come to a worker lately, by who sent it: that is what evicts the caches of others."""

from collections import Counter

from extproc.features.misses.sender import Sender

# New tokens are counted by spans of so many seconds, and remembered for so many spans.
SPAN_SECONDS = 15.0
SPANS = 240

# Most senders that are told apart in one span; the others count as one.
MOST_SENDERS = 64
OTHERS = Sender("", "others", "")


class Growth:
    """The new tokens that came to one worker; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._spans: dict[int, Counter[Sender]] = {}

    def add(self, sender: Sender, tokens: int, now: float) -> None:
        """Notes that a sender's prompt came, of which so many tokens were not there."""
        span = int(now // SPAN_SECONDS)
        counts = self._spans.get(span)
        if counts is None:
            counts = self._spans[span] = Counter()
            for old in [one for one in self._spans if one <= span - SPANS]:
                del self._spans[old]
        if sender not in counts and len(counts) >= MOST_SENDERS:
            sender = OTHERS
        counts[sender] += tokens

    def since(self, began: float) -> Counter[Sender]:
        """Returns the new tokens by sender since a time, to within a span."""
        first = int(began // SPAN_SECONDS)
        return sum([one for span, one in self._spans.items() if span >= first], Counter[Sender]())


def most_of(came: Counter[Sender]) -> str:
    """Returns in words who sent the most of what came, "" if nothing did."""
    total = came.total()
    if not total:
        return ""
    named: Counter[str] = Counter()
    for sender, tokens in came.items():
        named[sender.in_words] += tokens
    (name, most), *_ = named.most_common(1)
    return f"since then {total:,} new tokens came there, {most / total:.0%} of them from {name}"
