"""The claims at marks in Python, as extproc/native/mark_table.c keeps them."""

from collections.abc import Callable, Sequence
from math import inf

from extproc.routing.claims.claim_table import (
    Claim,
    Costs,
    Expected,
    Holdings,
    Lifetimes,
    ReportedBounds,
    ReportedClaim,
    ReportedCounts,
    ReportedPlaces,
)
from extproc.routing.claims.marks import KEY_BYTES, HasMarks, unpacked

_Claims = tuple[Claim, ...]


def _with_claim(claim: Claim, claims: _Claims) -> _Claims:
    """Returns claims with a new one, without those that can no longer count because of it."""
    holdings = claim.holdings
    others = [one for one in claims if one.holdings is not holdings]
    if len(others) == len(claims):
        return (claim, *claims)
    after = [claim]
    for one in claims:
        if one.holdings is holdings:
            after.append(one)
            if one.ended_at < inf:
                break  # an older one can no longer count, whatever is withdrawn
    return (*after, *others)


def _bytes_of(claims: _Claims) -> int:
    return sum([one.mark_bytes for one in claims])


class PlainMarkTable:
    """The claims at marks.

    Every request looks into it, and writes to it, at each of its marks.

    make: makes a claim. most: claims that a mark may have. fewer: chooses some of more; its second
    argument is when the requests under way began at the earliest. costs: of memory. bytes: of all.
    """

    def __init__(
        self,
        make: Callable[[Holdings, bytes, float, int, tuple[int, ...]], Claim],
        most: int,
        fewer: Callable[[_Claims, float], _Claims],
        costs: Costs,
        /,
    ) -> None:
        self._make = make
        self._most = most
        self._fewer = fewer
        self._costs = costs
        self._claims: dict[int, _Claims] = {}
        self.bytes = 0

    def __len__(self) -> int:
        """Returns how many marks have a claim."""
        return len(self._claims)

    def record(self, holdings: Holdings, marks: HasMarks, now: float, since: float, /) -> Claim:
        """Puts a new claim to its marks, and returns it; since: the second argument of `fewer`."""
        return self._record(holdings, marks.keys, marks.lengths, now, since)

    def record_reported(
        self,
        told: Sequence[ReportedClaim],
        places: ReportedPlaces,
        known: dict[int, Claim],
        bounds: ReportedBounds,
        now: float,
        since: float,
        /,
    ) -> ReportedCounts:
        """Puts the claims of another router to their marks; see `ClaimTable.record_reported`."""
        left, most_new, most_claims = bounds
        new, unknown, excess = 0, 0, 0
        for one in told:
            count = len(one.keys) // KEY_BYTES
            left -= count
            if left < 0 or most_new - new < count:
                excess += 1
            elif (place := places.get(one.worker)) is None:
                unknown += 1
            elif one.number not in known:
                new += count
                if len(known) >= most_claims:
                    del known[next(iter(known))]
                known[one.number] = self._record(place[1], one.keys, (), now, since)
        return new, unknown, excess

    def _record(
        self,
        holdings: Holdings,
        keys: bytes,
        lengths: tuple[int, ...],
        now: float,
        since: float,
    ) -> Claim:
        costs = self._costs
        mark_bytes = costs.place + costs.keys // (len(keys) or KEY_BYTES)
        claim = self._make(holdings, keys, now, mark_bytes, lengths)
        at, alone = self._claims, (claim,)
        after: _Claims = alone
        more = 0
        before: _Claims | None = None
        for key in unpacked(keys):
            claims = at.setdefault(key, alone)
            if claims is alone:
                self.bytes += costs.slot + mark_bytes
                continue
            if claims is not before:  # neighbouring marks usually have the same claims
                before = claims
                after = _with_claim(claim, claims)
                if len(after) > self._most:
                    after = self._fewer(after, since)
                more = _bytes_of(after) - _bytes_of(claims)
            at[key] = after
            self.bytes += more
        return claim

    def withdraw(self, claim: Claim, /) -> None:
        """Removes a claim from its marks."""
        for key in unpacked(claim.keys):
            claims = self._claims.get(key, ())
            after = tuple([one for one in claims if one is not claim])
            if len(after) == len(claims):
                continue
            self.bytes -= claim.mark_bytes
            if after:
                self._claims[key] = after
            else:
                del self._claims[key]
                self.bytes -= self._costs.slot

    def stretches(self, lengths: Sequence[int], keys: bytes, /) -> Sequence[tuple[int, _Claims]]:
        """Returns the longest mark of each run of marks with the same claims, and these claims.

        Marks are looked up one by one, as far as they have claims.
        """
        stretches: list[tuple[int, _Claims]] = []
        before: _Claims | None = None
        longest = 0
        for length, key in zip(lengths, unpacked(keys), strict=True):
            claims = self._claims.get(key)
            if claims is not before:
                if before is not None:
                    stretches.append((longest, before))
                before = claims
            if claims is None:
                return stretches
            longest = length
        return stretches if before is None else [*stretches, (longest, before)]


def plain_expected(
    old: PlainMarkTable,
    young: PlainMarkTable,
    lengths: Sequence[int],
    keys: bytes,
    now: float,
    lifetimes: Lifetimes,
    /,
) -> dict[str, Expected]:
    """Returns what each worker probably holds of a prompt with these marks, by two generations."""
    found: dict[str, Expected] = {}
    for generation in (old, young):
        for length, claims in generation.stretches(lengths, keys):
            newest: Holdings | None = None
            for claim in claims:
                holdings = claim.holdings
                if holdings is newest:
                    continue  # this worker's newest claim is the one that counts
                newest, age = holdings, now - claim.sent_at
                if age >= lifetimes.approximate or claim.sent_at <= holdings.lost_at:
                    continue
                worker = holdings.worker
                speculative, approximate = found.get(worker, (0, 0))
                is_under_way = now < claim.ended_at + lifetimes.grace
                if is_under_way and age < lifetimes.speculative and length > speculative:
                    speculative = length
                found[worker] = (speculative, max(length, approximate))
    return found
