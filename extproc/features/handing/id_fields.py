"""The fields of a body in which engines take the ids of a prompt, and how a body gets them.

Chat completions, messages and responses of vLLM: `kv_transfer_params.prompt_token_ids`, from 0.27
on (`_reused_prompt_token_ids` of renderers/online_renderer.py; 0.33: `preprocess_chat`, which then
neither renders nor tokenizes). Chat completions of SGLang: `input_ids`, which are taken without
rendering (`_process_messages` of serving_chat.py, 0.5.23). They also leave out what its own
conversation templates add, their stop words and a beginning of thoughts; where it uses one, by
--chat-template or by a model's name, it refuses the roles of tools. So an answered golden request
with such a role proves that it does not. Completions: a `prompt` of ids, as in OpenAI's API.

The field is written at the body's end, where it counts instead of an earlier one
(`extproc.requests.added_fields`).
"""

from collections.abc import Mapping
from typing import NamedTuple

from extproc._core import id_list
from extproc.base.engine import PYTHON, SGLANG, VLLM, Engine
from extproc.requests.messages_request import PATH as MESSAGES_PATH
from extproc.requests.prompt import GIVEN, ROLES
from extproc.requests.request import CHAT_PATH
from extproc.requests.responses_request import PATH as RESPONSES_PATH
from kvstate.overlap import Tokens

COMPLETIONS_PATH = "/v1/completions"


class IdField(NamedTuple):
    """How ids are written, and what proves that an engine takes them.

    before, after: what stands around the list of ids. forms: those that golden requests prove, 0
    if engines need no proof. holds_legs: whether the same member tells of other workers' parts.
    """

    before: bytes
    after: bytes
    forms: int
    holds_legs: bool = False


_TRANSFER = IdField(b'"kv_transfer_params":{"prompt_token_ids":', b"}", GIVEN, holds_legs=True)
_PROMPT = IdField(b'"prompt":', b"", 0)

# By an engine's name, and by path.
FIELDS: Mapping[str, Mapping[str, IdField]] = {
    VLLM: {
        CHAT_PATH: _TRANSFER,
        MESSAGES_PATH: _TRANSFER,
        RESPONSES_PATH: _TRANSFER,
        COMPLETIONS_PATH: _PROMPT,
    },
    SGLANG: {
        CHAT_PATH: IdField(b'"input_ids":', b"", GIVEN | ROLES),
        COMPLETIONS_PATH: _PROMPT,
    },
}

# The paths on which any engine takes ids.
PATHS = frozenset().union(*FIELDS.values())


def field_of(engine: Engine | None, path: str) -> IdField | None:
    """Returns the field in which an engine takes ids on a path, None if none is known.

    No Rust front end takes any: vLLM's refuses a body in which a member stands twice.
    """
    if engine is None or engine.front_end != PYTHON:
        return None
    return FIELDS.get(engine.name, {}).get(path)


def member_of(field: IdField, tokens: Tokens) -> bytes:
    """Returns the member of a body that gives an engine the ids of a prompt.

    It has the ids' digits and commas, six or seven bytes for each.
    """
    return b"%b%b%b" % (field.before, id_list(tokens), field.after)
