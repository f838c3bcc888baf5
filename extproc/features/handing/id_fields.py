"""The fields of a body in which engines take the ids of a prompt, and how a body gets them.

Chat completions, messages and responses of vLLM: `kv_transfer_params.prompt_token_ids`, from 0.27
on (`_reused_prompt_token_ids` of renderers/online_renderer.py; 0.33: `preprocess_chat`, which then
neither renders nor tokenizes). Completions: a `prompt` of ids, as in OpenAI's API, in all engines.

The field is written at the body's end, where it counts instead of an earlier one
(`extproc.requests.added_fields`).
"""

from typing import NamedTuple

from extproc._core import id_list
from extproc.requests.messages_request import PATH as MESSAGES_PATH
from extproc.requests.prompt import GIVEN
from extproc.requests.request import CHAT_PATH
from extproc.requests.responses_request import PATH as RESPONSES_PATH
from kvstate.overlap import Tokens

COMPLETIONS_PATH = "/v1/completions"


class IdField(NamedTuple):
    """How ids are written, and what proves that an engine takes them.

    before, after: what stands around the list of ids. form: that a golden request proves, 0 if
    engines need no proof.
    """

    before: bytes
    after: bytes
    form: int


_TRANSFER = IdField(b'"kv_transfer_params":{"prompt_token_ids":', b"}", GIVEN)

FIELDS = {
    CHAT_PATH: _TRANSFER,
    MESSAGES_PATH: _TRANSFER,
    RESPONSES_PATH: _TRANSFER,
    COMPLETIONS_PATH: IdField(b'"prompt":', b"", 0),
}


def member_of(path: str, tokens: Tokens) -> bytes:
    """Returns the member of a body that gives an engine the ids of a prompt.

    It has the ids' digits and commas, six or seven bytes for each.
    """
    field = FIELDS[path]
    return b"%b%b%b" % (field.before, id_list(tokens), field.after)
