import pytest

from extproc.base.errors import RequestError
from extproc.renderers.refusing import RefusingRenderer
from extproc.requests.prompt import Chat


def test_refusing_renderer_refuses_every_conversation_for_its_reason() -> None:
    renderer = RefusingRenderer("no_chat_template")
    with pytest.raises(RequestError, match="no_chat_template"):
        renderer.render(Chat([{"role": "user", "content": "hi"}], {}), budget_seconds=1.0)
