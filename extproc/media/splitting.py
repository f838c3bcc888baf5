"""Whether an engine knows each item of a request by itself.

SGLang makes an item's ids of what its processor returns. Releases before 0.5.10, and some models'
processors, return one thing for all items of a request: then each has the ids of all together, and
with one more image all have others. Other processors cut an image into fewer tiles if there are
several. So what was learned from one request need not hold in another, and counts as uncertain
until a stored prompt shows an item that was known before as it was, beside a new one.

Source: get_new_expanded_mm_items in srt/managers/mm_utils.py (0.5.9 to 0.5.23), and
SGLANG_ENABLE_MM_SPLITTING, off in 0.5.9.
"""

from collections.abc import Collection, Sequence

from extproc.media.identities import Identity


class Splits:
    """The models whose engines know each item by itself. Models are the configured ones."""

    def __init__(self) -> None:
        self._proved: set[str] = set()
        self._refuted: set[str] = set()

    def is_proved(self, model: str) -> bool:
        """Returns whether items of a model do not depend on each other."""
        return model in self._proved and model not in self._refuted

    def prove(self, model: str) -> None:
        """Notes that an item was the same beside a new one."""
        self._proved.add(model)

    def refute(self, model: str) -> None:
        """Notes that a known item was another one in a request with several."""
        self._refuted.add(model)


def shows_split(
    before: Sequence[Identity | None], found: Collection[object], stored: Collection[object]
) -> bool:
    """Returns whether a stored prompt has an item that was known before, and another.

    before: what was known of the prompt's items. found: the names of those that it shows. stored:
    the ids that are an item's own in it.
    """
    names = {one.name for one in before if one is not None} & {*stored}
    return bool(names) and bool({*found} - names)
