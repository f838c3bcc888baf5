from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Policy
from extproc.routing.candidates.sampling import sample_of, sample_size


@given(st.data(), st.integers(1, 5), st.integers(1, 60), st.integers())
def test_sample_has_distinct_eligible_workers_and_few_equals(
    data: st.DataObject, count: int, more: int, seed: int
) -> None:
    eligible = range(count + more)
    saved = st.dictionaries(st.sampled_from(eligible), st.sampled_from([16.0, 32.0, 48.0]))
    holders = data.draw(saved)
    sample = sample_of(eligible, holders, count, Random(seed))
    assert len(set(sample)) == len(sample)
    assert set(sample) <= set(eligible)
    assert len(sample) >= count
    # the random ones come first; of those that were added for what they hold, few hold the same
    added = Counter(holders[place] for place in sample[count:])
    assert all(number <= count for number in added.values())
    assert set(holders.values()) <= {holders.get(place) for place in sample}


def test_sample_size_is_smaller_among_routers_unless_configured() -> None:
    alone, among = (sample_size(Policy(), is_alone=is_alone) for is_alone in (True, False))
    assert alone > among
    assert sample_size(Policy(sample=7), is_alone=True) == 7
