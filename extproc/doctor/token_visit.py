"""Compares a worker's tokens with ours, by asking its POST /tokenize."""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from extproc.config.schema import RemoteTokenizer, Worker
from extproc.doctor.findings import About, Finding
from extproc.doctor.worker_visit import Means, Visited
from extproc.errors import RequestError
from extproc.requests.prompt import Chat, Text
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.remote_tokenizer_wire import PATH, answered, question
from extproc.tokenizing.tokens import Tokenizer
from kvstate.overlap import Tokens

Claim = tuple[str, Tokens, Tokens]  # of what; the engine's ids, ours

# Words, numbers, spaces, code, accents, other scripts: where tokenizers differ, they differ here.
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "    for n in range(1234567890):\n\t\treturn {'a': n ** 2}  # 3.14159\n\n",
    "naïve café, Straße, 東京 도쿄 Москва \U0001f680",
)

_USER = {"role": "user", "content": TEXTS[0]}
_SYSTEM = {"role": "system", "content": "Answer briefly, in the words of the question."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    },
}

# What templates treat each in a way of its own. By name: the fields of the request.
CONVERSATIONS: Mapping[str, Mapping[str, Any]] = {
    "a conversation": {"messages": [_USER]},
    "a conversation with a system turn": {"messages": [_SYSTEM, _USER]},
    "a conversation of several turns": {
        "messages": [_USER, {"role": "assistant", "content": TEXTS[2]}, _USER]
    },
    "a conversation with tools": {"messages": [_USER], "tools": [_TOOL]},
    "a conversation that thinks": {
        "messages": [_USER],
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "a conversation that does not think": {
        "messages": [_USER],
        "chat_template_kwargs": {"enable_thinking": False},
    },
}


async def visit(means: Means, worker: Worker, visited: Visited, about: About) -> list[Finding]:
    """Compares a local tokenizer with the worker's, or tests the worker as a remote tokenizer."""
    model = visited.model
    if model is None or model.tokenizer is None:
        return []
    options = model.tokenizer
    if isinstance(options, RemoteTokenizer):
        return await _remote(means, worker, visited, options, about) if options.remote else []
    tokenizer = means.tokenizers.get(model.name)
    if tokenizer is None:
        return []
    claims: list[Claim] = []
    for text in TEXTS:
        theirs = await engine_tokens(means, worker, visited, Text(text))
        if isinstance(theirs, str):
            return [about.note("tokens", f"not compared: {theirs}")]
        claims.append((repr(text[:20]), theirs, await _ours(tokenizer, Text(text))))
    found: list[Finding] = []
    for what, fields in CONVERSATIONS.items():
        prompt = _chat(fields)
        theirs = await engine_tokens(means, worker, visited, prompt)
        if isinstance(theirs, str):
            if not found and len(claims) == len(TEXTS):
                break  # SGLang takes no conversations
            found.append(about.note("tokens", f"{what} is not compared: {theirs}"))
            continue
        try:
            claims.append((what, theirs, await _ours(tokenizer, prompt)))
        except RequestError as error:
            found.append(about.note("tokens", f"{what} is not keyed: {error.reason}"))
    return [judge_tokens(about, claims, PATH), *found]


async def engine_tokens(
    means: Means, worker: Worker, visited: Visited, prompt: Chat | Text
) -> Tokens | str:
    """Returns the engine's own ids of a prompt, or in words why there are none."""
    asked = question(prompt, visited.model_name or None)
    answer = await means.web.post(f"http://{worker.endpoint}{PATH}", asked)
    if not answer.is_ok:
        return f"{PATH}: {answer.reason or f'status {answer.status}'}"
    try:
        return answered(answer.body)
    except RequestError:
        return f"{PATH}: an answer that cannot be read"


async def _remote(
    means: Means, worker: Worker, visited: Visited, options: RemoteTokenizer, about: About
) -> list[Finding]:
    """Asks as the router does; returns whether each answer would have come in time."""
    findings: list[Finding] = []
    for what, prompt in (("a text", Text(TEXTS[0])), ("a conversation", _chat())):
        begun = time.monotonic()
        tokens = await engine_tokens(means, worker, visited, prompt)
        took_ms = (time.monotonic() - begun) * 1000
        if isinstance(tokens, str):
            findings.append(about.wrong("tokenizer-refuses", f"of {what}: {tokens}"))
        elif took_ms > options.deadline_ms:
            says = (
                f"{PATH} of {what} took {took_ms:.0f} ms; the deadline is {options.deadline_ms} ms"
            )
            findings.append(about.wrong("tokenizer-slow", says))
        else:
            findings.append(about.right("tokens", f"{PATH} of {what} answers in {took_ms:.0f} ms"))
    return findings


def _chat(fields: Mapping[str, Any] = CONVERSATIONS["a conversation"]) -> Chat:
    (prompt,) = parse(CHAT_PATH, json.dumps(fields).encode()).prompts
    assert isinstance(prompt, Chat)  # noqa: S101 - of what is written above
    return prompt


async def _ours(tokenizer: Tokenizer, prompt: Chat | Text) -> Tokens:
    return await asyncio.to_thread(tokenizer.encode, prompt)


def judge_tokens(about: About, claims: Iterable[Claim], witness: str) -> Finding:
    """Returns whether an engine's ids are ours.

    claims: texts with both ids. witness: where the engine's ids come from.
    """
    count = 0
    for what, theirs, ours in claims:
        count += 1
        at = next(
            (at for at, pair in enumerate(zip(theirs, ours, strict=False)) if _differ(pair)), None
        )
        if at is not None:
            says = f"of {what}, token {at} is {theirs[at]} in the engine and {ours[at]} here"
            return about.wrong("tokens-differ", f"{says}, by {witness}")
        if len(theirs) != len(ours):
            says = f"of {what}, the engine has {len(theirs)} tokens and we have {len(ours)}"
            return about.wrong("tokens-differ", f"{says}, by {witness}")
    return about.right("tokens", f"the engine's are ours in {count} of {count} texts, by {witness}")


def _differ(pair: tuple[int, int]) -> bool:
    return pair[0] != pair[1]
