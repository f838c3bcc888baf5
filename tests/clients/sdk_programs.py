"""Asks a model once with an SDK of Python; runs where the SDK is installed, not where KVSteer is.

    PYTHON sdk_programs.py openai|anthropic whole|stream URL MODEL

The SDK has its defaults. Prints the answer, or the kind of error.
"""

import sys
from typing import Any

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Is it done?"}]
TOKEN = "my-token"


def openai(url: str, model: str, *, streams: bool) -> str:
    """Asks with OpenAI's SDK."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=TOKEN)
    made: Any = client.chat.completions.create(model=model, messages=QUESTION, stream=streams)
    if not streams:
        return str(made.choices[0].message.content)
    return "".join(one.choices[0].delta.content or "" for one in made if one.choices)


def anthropic(url: str, model: str, *, streams: bool) -> str:
    """Asks with Anthropic's SDK."""
    from anthropic import Anthropic

    client: Any = Anthropic(base_url=url, api_key=TOKEN)
    asked = {"model": model, "messages": QUESTION, "max_tokens": 100}
    if not streams:
        said = client.messages.create(**asked)
        return "".join(one.text for one in said.content if one.type == "text")
    with client.messages.stream(**asked) as stream:
        return "".join(stream.text_stream)


def main(sdk: str, kind: str, url: str, model: str) -> None:
    """Prints what came of it."""
    ask = {"openai": openai, "anthropic": anthropic}[sdk]
    try:
        print(ask(url, model, streams=kind == "stream"))
    except Exception as error:  # noqa: BLE001 - the kind of error is the result
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
