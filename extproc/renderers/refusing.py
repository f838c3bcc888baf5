"""A renderer that keys no conversation, for models whose prompts cannot be rendered here."""

from extproc.base.errors import RequestError
from extproc.renderers.segments import ControlMarks
from extproc.requests.prompt import Chat


class RefusingRenderer:
    """Refuses every conversation. reason: under which it is counted."""

    marks: ControlMarks | None = None
    is_shown_by_tokenize = True
    drops_media = False

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def render(self, chat: Chat, *, budget_seconds: float) -> tuple[str, int]:
        """Raises RequestError, always; as `extproc.renderers.renderer.Renderer`."""
        del chat, budget_seconds  # every conversation is refused alike
        raise RequestError(self._reason)
