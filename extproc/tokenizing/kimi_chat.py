"""What the code of Kimi's tokenizer does to a conversation before its chat template gets it.

Source: apply_chat_template in tokenization_kimi.py of Kimi K2, K2 Thinking, K2.5 and K2.6: tools
get sorted keys, the models from K2.5 on get them as declarations as well, and what a request does
not switch has the code's own setting.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.renderers.kimi_tools import declarations
from extproc.requests.prompt import IN_CODE, Chat
from extproc.templates.conversions import with_sorted_keys
from extproc.tokenizing.kimi_code import KimiCode


def as_kimis(chat: Chat, code: KimiCode) -> tuple[Chat, int]:
    """Returns a conversation as the template gets it, and IN_CODE if the code writes its tools.

    Checkpoints may have other code for that, so such a conversation needs a proof.

    Raises:
        RequestError: it is not known what the code makes of the tools.
    """
    variables: Mapping[str, Any] = {**code.switches, **chat.variables}
    forms = 0
    tools = variables.get("tools")
    if tools == []:
        raise RequestError("unsupported_tools")
    if tools and (code.sorts_tools or code.writes_tools):
        tools = with_sorted_keys(tools)
        variables = {**variables, "tools": tools}
    if tools and code.writes_tools:
        forms = IN_CODE
        written = declarations(tools)
        if written is not None:
            variables = {**variables, "tools_ts_str": written}
    return msgspec.structs.replace(chat, variables=dict(variables)), forms
