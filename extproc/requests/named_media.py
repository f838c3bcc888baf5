"""Finds media that a request names instead of sending them.

vLLM keeps media that it has processed under the `uuid` of their part, if a client gives one, and
under `mm_hashes` of `features` (/inference/v1/generate), and a later request may send the name
alone. These names know no tenants: by another one's name a model describes another one's image.
Sources: vLLM 0.32's `renderers/chat_utils.py`, `multimodal/processing/inputs.py`,
`entrypoints/scale_out/token_in_token_out/protocol.py`.
"""

from extproc.requests.draft import Draft
from kvstate.scan import Parts

TOKENS_PATH = "/inference/v1/generate"

# No engine reads parts in deeper lists and objects.
MAX_DEPTH = 8

# The members in which parts are. A part's name that is null names nothing; of several names in one
# part any counts.
_HOLDERS = (b"messages", b"input")
_FEATURES = b"features"
PARTS = Parts(len(_HOLDERS), b"uuid", (b"content", b"output"), MAX_DEPTH)


def names_on(path: str) -> tuple[bytes, ...]:
    """Returns the members of bodies in which media may be named, those of `PARTS` first."""
    return (*_HOLDERS, _FEATURES) if path == TOKENS_PATH else _HOLDERS


def names_media(draft: Draft) -> bool:
    """Returns whether a body names media, or may do so deeper than anything is looked for."""
    return draft.is_named or bool(draft.named(_FEATURES))
