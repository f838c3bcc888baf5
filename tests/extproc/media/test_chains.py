from array import array

from extproc.media.chains import Chain, findings_in
from tests.extproc.media.stores import SIZE, Shot, prompt


def test_chain_of_texts_in_the_middle_of_a_prompt_shows_nothing() -> None:
    sent = prompt([1, 2, 3], Shot("cat"), [20, 21, 22, 23])
    chain = Chain(9, False, SIZE, array("I", [20, 21, 22, 23]), (), None, (), 1)
    assert findings_in(chain, sent, [None]) is None
