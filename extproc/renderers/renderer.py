"""The interface of a renderer in code: one for each family of models, in a module of its own.

Some models have no chat template, or engines do not use it: their conversations are written by
code, of the engine or of the checkpoint. This folder has such code written anew, by the behaviour
of the engine's: gpt-oss (`harmony`), DeepSeek, Kimi, Mistral. Like a template it turns a
conversation into text, or into segments, where control tokens must not be confused with a user's
text (`segments`).

It may know conversations and dialects. It knows no token ids, no files and no worker, and is pure;
`extproc.tokenizing.families` says which model gets which renderer.

The rule: the same text as the engine's, or a `RequestError` that names the reason. What an engine
refuses is refused, and what was not compared with its code is not guessed (`refusing`).
"""

from typing import Protocol

from extproc.renderers.segments import ControlMarks
from extproc.requests.prompt import Chat


class Renderer(Protocol):
    """Renders a conversation as the engine's own code does; safe to use from several threads.

    marks: of the control tokens in what it renders (`segments`). None if it renders one text that
        the model's tokenizer.json tokenizes, special tokens in it included, as a chat template's.
    is_shown_by_tokenize: whether the engine's POST /tokenize renders conversations alike, so that
        golden requests can be compared there.
    drops_media: whether the engine leaves a conversation's media out, and answers without them.
    """

    marks: ControlMarks | None
    is_shown_by_tokenize: bool
    drops_media: bool

    def render(self, chat: Chat, *, budget_seconds: float) -> tuple[str, int]:
        """Returns the prompt of a conversation, and the forms that its dialect decided.

        The prompt is a text, or segments that `marks` joined. It depends on nothing but the chat,
        whose dialect holds the rules of the engine's release, and on a clock that the renderer was
        given, if the engine writes a date.

        budget_seconds: how long it may take, checked between messages.

        Raises:
            RequestError: the engine refuses the conversation; or its prompt is not certain, since
                releases differ and the chat has no dialect.
        """
