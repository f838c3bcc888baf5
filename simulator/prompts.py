"""From a request's body to the prompt's token ids, with the errors that the API owes the client."""

import asyncio
from collections.abc import Callable, Sequence

from simulator.requests import Chat, Completion, Tokenize, split_prompts
from simulator.responses import bad_request
from simulator.tokens import ModelTokens, PromptError

Tokens = list[int]


async def of_completion(tokens: ModelTokens, body: Completion) -> list[Tokens]:
    """The ids of every prompt of a completion request."""
    try:
        prompts = split_prompts(body.prompt)
    except ValueError as error:
        raise bad_request(str(error), "prompt") from error
    return [await _of_prompt(tokens, prompt) for prompt in prompts]


async def of_chat(tokens: ModelTokens, body: Chat | Tokenize) -> Tokens:
    """The ids of a conversation."""

    def render() -> Tokens:
        return tokens.of_chat(
            body.messages or [],
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            template_arguments=body.chat_template_kwargs,
        )

    return await _apart(render)


async def of_tokenize(tokens: ModelTokens, body: Tokenize) -> Tokens:
    """The ids of whichever of prompt and messages was sent."""
    if body.messages is not None:
        return await of_chat(tokens, body)
    if body.prompt is None:
        raise bad_request("either prompt or messages is needed")
    return await _of_prompt(tokens, body.prompt)


async def _of_prompt(tokens: ModelTokens, prompt: str | Sequence[int]) -> Tokens:
    if isinstance(prompt, str):
        ids = await _apart(lambda: tokens.of_text(prompt))
    else:
        ids = list(prompt)
    if not ids:
        raise bad_request("The prompt has no tokens", "prompt")
    if min(ids) < 0 or max(ids) >= tokens.size:
        raise bad_request(f"Token ids must be from 0 to {tokens.size - 1}", "prompt")
    return ids


async def _apart(tokenize: Callable[[], Tokens]) -> Tokens:
    # A long prompt takes long enough to hold up every other request.
    try:
        return await asyncio.to_thread(tokenize)
    except PromptError as error:
        raise bad_request(str(error), "messages") from error
