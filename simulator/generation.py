"""The endpoints that generate: what they ask of the engine, how they send what it says."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec
from aiohttp import web

from simulator import prompts
from simulator.answers import Writer
from simulator.engine import Engine, Job, Step
from simulator.hashing import Adapter, Namespace
from simulator.requests import Chat, Completion, Generation
from simulator.responses import ApiError, Body, Form, Usage, bad_request
from simulator.settings import Settings
from simulator.tokens import ModelTokens

_DEFAULT_COMPLETION_TOKENS = 16  # the OpenAI API's own default for completions

Sink = Callable[[int, Step], Awaitable[None]]


class Generator:
    """Answers completions and chats with one engine."""

    def __init__(
        self, settings: Settings, tokens: ModelTokens, writer: Writer, engine: Engine
    ) -> None:
        self._settings = settings
        self._tokens = tokens
        self._writer = writer
        self._engine = engine
        self._adapters = {
            name: Adapter(name, number) for number, name in enumerate(settings.loras, start=1)
        }

    def check_model(self, model: str | None) -> None:
        """Refuse a model that is not served here (404); none named means the base model."""
        if model not in {None, self._settings.model, *self._adapters}:
            message = f"The model `{model}` does not exist."
            raise ApiError(404, "NotFoundError", message, "model")

    async def completion(self, request: web.Request, body: Completion) -> web.StreamResponse:
        """POST /v1/completions."""
        self.check_model(body.model)
        limit = body.max_tokens or _DEFAULT_COMPLETION_TOKENS
        jobs: list[Job] = []
        for prompt in await prompts.of_completion(self._tokens, body):
            jobs += self._jobs(request, body, prompt, limit)
        return await self._answer(request, body, jobs, chat=False)

    async def chat(self, request: web.Request, body: Chat) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        self.check_model(body.model)
        prompt = await prompts.of_chat(self._tokens, body)
        limit = body.max_completion_tokens or body.max_tokens
        return await self._answer(
            request, body, self._jobs(request, body, prompt, limit), chat=True
        )

    def _jobs(
        self, request: web.Request, body: Generation, prompt: Sequence[int], limit: int | None
    ) -> list[Job]:
        """One job a choice. Without a limit an answer ends by itself."""
        context = self._settings.context_tokens
        room = context - len(prompt)
        if room < (limit or 1):
            raise bad_request(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{limit or 1} output tokens and your prompt contains {len(prompt)} input tokens. "
                "Please reduce the length of either one."
            )
        jobs: list[Job] = []
        for choice in range(body.choices):
            length = limit or self._writer.length(self._writer.seed(prompt, choice))
            job = Job(
                prompt=prompt,
                output_tokens=min(length, room),
                ends_turn=limit is None and length <= room,
                namespace=Namespace(self._adapters.get(body.model or ""), body.cache_salt),
                session_id=request.headers.get("X-Session-ID") or body.session_id,
                choice=choice,
                reuse=body.prompt_logprobs is None,
            )
            jobs.append(job)
        return jobs

    async def _answer(
        self, request: web.Request, body: Generation, jobs: Sequence[Job], *, chat: bool
    ) -> web.StreamResponse:
        form = Form(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=body.model or self._settings.model,
            chat=chat,
        )
        # Several answers to one prompt share its tokens.
        usage = Usage(prompt_tokens=sum(len(job.prompt) for job in jobs if not job.choice))
        if body.stream:
            return await self._stream(request, body, jobs, form, usage)
        return await self._whole(jobs, form, usage)

    async def _whole(self, jobs: Sequence[Job], form: Form, usage: Usage) -> web.Response:
        answers: list[list[int]] = [[] for _ in jobs]
        reasons: list[str | None] = [None for _ in jobs]

        async def collect(index: int, step: Step) -> None:
            answers[index].append(step.token)
            reasons[index] = step.finish_reason

        await self._run(jobs, usage, collect)
        texts = map(self._tokens.text_of, answers)
        body = form.whole(list(zip(texts, reasons, strict=True)), usage)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _stream(
        self,
        request: web.Request,
        body: Generation,
        jobs: Sequence[Job],
        form: Form,
        usage: Usage,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        await response.prepare(request)

        async def send(index: int, step: Step) -> None:
            text = self._tokens.text_of([step.token])
            await response.write(_server_sent(form.piece(index, text, step.finish_reason)))

        try:
            for index in range(len(jobs)):
                if opening := form.opening(index):
                    await response.write(_server_sent(opening))
            await self._run(jobs, usage, send)
            if body.wants_usage_chunk:
                await response.write(_server_sent(form.closing(usage)))
            await response.write(b"data: [DONE]\n\n")
        except* ConnectionResetError:
            pass  # The client left; leaving `_run` freed the blocks.
        return response

    async def _run(self, jobs: Sequence[Job], usage: Usage, sink: Sink) -> None:
        """Run all jobs at once, handing each token to `sink` with its job's number."""

        async def run(index: int, job: Job) -> None:
            async with aclosing(self._engine.run(job)) as steps:
                async for step in steps:
                    usage.completion_tokens += 1
                    if step.finish_reason and not job.choice:
                        usage.cached_tokens += step.cached_tokens
                    await sink(index, step)

        async with asyncio.TaskGroup() as group:
            for index, job in enumerate(jobs):
                group.create_task(run(index, job))


def _server_sent(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
