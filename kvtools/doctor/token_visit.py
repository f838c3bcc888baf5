"""Compares a worker's tokens for golden requests, from its POST /tokenize, with ours."""

import asyncio
import time

from extproc.base.errors import RequestError
from extproc.config.schema import RemoteTokenizerSettings, WorkerSettings
from extproc.proof.golden import (
    GOLDEN,
    TEXTS,
    GoldenTokens,
    NoTokenizeError,
    TextOf,
    TokenizerSilentError,
    comparison,
    golden_for,
    golden_tokens,
    in_words,
    own_tokens,
    tokens_there,
)
from extproc.requests.dialect import dialect_of
from extproc.requests.prompt import Chat, Text
from extproc.tokenizing.remote_tokenizer_wire import PATH, answered, question
from kvstate.overlap import Tokens
from kvtools.doctor.findings import Finding, Subject
from kvtools.doctor.worker_visit import OK, VisitTools, WorkerReport


async def visit(
    tools: VisitTools, worker: WorkerSettings, visited: WorkerReport, about: Subject
) -> list[Finding]:
    """Compares a local tokenizer with the worker's, or tests the worker as a remote tokenizer."""
    model = visited.model
    if model is None or model.tokenizer is None:
        return []
    options = model.tokenizer
    if isinstance(options, RemoteTokenizerSettings):
        return await _remote(tools, worker, visited, options, about) if options.remote else []
    tokenizer = tools.tokenizers.get(model.name)
    if tokenizer is None:
        return []
    golden = golden_for(tokenizer, dialect_of(visited.engine))
    try:
        theirs = await tokens_there(
            lambda asked: _post(tools, worker, asked), visited.model_name or None, golden
        )
    except (TokenizerSilentError, NoTokenizeError) as error:
        return [about.note("tokens", f"not compared: {error}")]
    ours = await asyncio.to_thread(own_tokens, tokenizer, golden)
    tokens = golden_tokens(tokenizer, golden, ours, theirs)
    return [judge_tokens(about, tokens, tokenizer.text_of), *_uncompared(about, tokens)]


async def _post(tools: VisitTools, worker: WorkerSettings, asked: bytes) -> tuple[int, bytes]:
    answer = await tools.web.post(f"http://{worker.endpoint}{PATH}", asked)
    if answer.reason and answer.status in (0, OK):
        raise TokenizerSilentError(f"{PATH}: {answer.reason}")
    return answer.status, answer.body


_CONVERSATION = next(one.prompt for one in GOLDEN if isinstance(one.prompt, Chat))


async def engine_tokens(
    tools: VisitTools, worker: WorkerSettings, visited: WorkerReport, prompt: Chat | Text
) -> Tokens | str:
    """Returns the engine's token ids for a prompt, or the reason why there are none."""
    return await _tokenize_at(tools, worker, question(prompt, visited.model_name or None))


async def _tokenize_at(tools: VisitTools, worker: WorkerSettings, asked: bytes) -> Tokens | str:
    answer = await tools.web.post(f"http://{worker.endpoint}{PATH}", asked)
    if not answer.is_ok:
        return f"{PATH}: {answer.reason or f'status {answer.status}'}"
    try:
        return answered(answer.body)
    except RequestError:
        return f"{PATH}: an answer that cannot be read"


async def _remote(
    tools: VisitTools,
    worker: WorkerSettings,
    visited: WorkerReport,
    options: RemoteTokenizerSettings,
    about: Subject,
) -> list[Finding]:
    """Asks as the router does; returns findings on whether each answer would be in time."""
    findings: list[Finding] = []
    for what, prompt in (("a text", Text(TEXTS[0])), ("a conversation", _CONVERSATION)):
        begun = time.monotonic()
        tokens = await engine_tokens(tools, worker, visited, prompt)
        took_ms = (time.monotonic() - begun) * 1000
        if isinstance(tokens, str):
            findings.append(about.wrong("tokenizer-refuses", f"for {what}: {tokens}"))
        elif took_ms > options.deadline_ms:
            says = (
                f"{PATH} took {took_ms:.0f} ms for {what}; the deadline is {options.deadline_ms} ms"
            )
            findings.append(about.wrong("tokenizer-slow", says))
        else:
            findings.append(about.right("tokens", f"{PATH} took {took_ms:.0f} ms for {what}"))
    return findings


def judge_tokens(
    about: Subject, tokens: list[GoldenTokens], text_of: TextOf, witness: str = PATH
) -> Finding:
    """Returns whether an engine's token ids match KVSteer's.

    text_of: returns the text of token ids. witness: the source of the engine's ids.
    """
    found = comparison(tokens, text_of)
    first = next((one.mismatch for one in found.forms.values() if one.mismatch is not None), None)
    if first is not None:
        return about.wrong("tokens-differ", in_words(first, witness))
    return about.right(
        "tokens",
        f"they match the engine's in {found.compared} golden requests, according to {witness}",
    )


def _uncompared(about: Subject, tokens: list[GoldenTokens]) -> list[Finding]:
    """Notes the golden requests that could not be compared, one note for each reason."""
    reasons: dict[str, list[str]] = {}
    for golden, ours, theirs in tokens:
        if isinstance(ours, str):
            reasons.setdefault(f"not keyed here: {ours}", []).append(golden.name)
        elif isinstance(theirs, str):
            reasons.setdefault(f"not compared: {theirs}", []).append(golden.name)
    return [about.note("tokens", f"{', '.join(names)}: {why}") for why, names in reasons.items()]
