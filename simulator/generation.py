"""The endpoints that generate: their jobs for the engine, and the form of their answers."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from simulator import requests
from simulator.engine import Job, SimulatedEngine, Step
from simulator.handover import Half
from simulator.hashing import CacheNamespace, PlacedItem
from simulator.requests import ChatRequest, Completion, Generation, Message
from simulator.responses import AnswerWriter, ApiError, Body, Form, UsageCounts, bad_request
from simulator.tokens import ModelTokens
from simulator.worker import SimulatedWorker

_DEFAULT_COMPLETION_TOKENS = 16  # the OpenAI API's own default for completions
_RANK_HEADER = "X-data-parallel-rank"

Sink = Callable[[int, Step], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Run:
    """The jobs of one request, and their total usage."""

    engine: SimulatedEngine
    jobs: Sequence[Job]
    usage: UsageCounts
    reports_last_answer: bool

    async def to_end(self, sink: Sink) -> None:
        """Runs all jobs at once, and passes each token to `sink` with its job's number."""
        async with asyncio.TaskGroup() as group:
            for index, job in enumerate(self.jobs):
                group.create_task(self._job(index, job, sink))

    async def _job(self, index: int, job: Job, sink: Sink) -> None:
        async with aclosing(self.engine.run(job)) as steps:
            async for step in steps:
                self.usage.completion_tokens += 1
                if step.finish_reason:
                    self._report(job, step.cached_tokens)
                await sink(index, step)

    def _report(self, job: Job, cached_tokens: int) -> None:
        if self.reports_last_answer:
            self.usage.cached_tokens = cached_tokens
        elif not job.choice:
            self.usage.cached_tokens += cached_tokens


class Generator:
    """Answers completions and chats, each on one of a worker's ranks."""

    def __init__(self, tokens: ModelTokens, writer: AnswerWriter, worker: SimulatedWorker) -> None:
        self._settings = worker.settings
        self._tokens = tokens
        self._writer = writer
        self._worker = worker
        self._adapters = worker.settings.adapters

    def check_model(self, model: str | None) -> None:
        """Rejects a model that is not served here (404); no name means the base model."""
        if model not in {None, self._settings.model, *self._adapters}:
            message = f"The model `{model}` does not exist."
            raise ApiError(404, "NotFoundError", message, "model")

    async def completion(self, request: web.Request, body: Completion) -> web.StreamResponse:
        """Answers POST /v1/completions."""
        self.check_model(body.model)
        limit = body.max_tokens or _DEFAULT_COMPLETION_TOKENS
        jobs: list[Job] = []
        for prompt in await requests.of_completion(self._tokens, body):
            jobs += self._jobs(request, body, prompt, limit)
        return await self._answer(request, body, jobs, chat=False)

    async def chat(self, request: web.Request, body: ChatRequest) -> web.StreamResponse:
        """Answers POST /v1/chat/completions."""
        self.check_model(body.model)
        prompt = await requests.of_chat(self._tokens, body)
        whole, items = self._tokens.with_images(body.messages, prompt)
        limit = body.max_completion_tokens or body.max_tokens
        jobs = self._jobs(request, body, whole, limit, items)
        return await self._answer(request, body, jobs, chat=True)

    async def message(self, request: web.Request, body: Message) -> web.StreamResponse:
        """Answers POST /v1/messages."""
        if body.stream:
            raise bad_request("messages are not streamed by this simulator")
        chat = body.as_chat()
        self.check_model(chat.model)
        prompt = await requests.of_chat(self._tokens, chat)
        jobs = self._jobs(request, chat, prompt, chat.max_tokens)
        return await self._answer(request, chat, jobs, chat=True, message=True)

    def _jobs(
        self,
        request: web.Request,
        body: Generation,
        prompt: Sequence[int],
        limit: int | None,
        items: tuple[PlacedItem, ...] = (),
    ) -> list[Job]:
        """Returns one job per choice. Without a limit, an answer ends by itself."""
        adapter = self._adapters.get(body.model or "")
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
                namespace=CacheNamespace(adapter, body.cache_salt, items),
                session_id=request.headers.get("X-Session-ID") or body.session_id,
                choice=choice,
                reuse=body.prompt_logprobs is None and self._settings.prefix_caching,
            )
            jobs.append(job)
        return jobs

    async def _answer(
        self,
        request: web.Request,
        body: Generation,
        jobs: Sequence[Job],
        *,
        chat: bool,
        message: bool = False,
    ) -> web.StreamResponse:
        engine = self._engine_for(request)
        form = Form(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=body.model or self._settings.model,
            chat=chat,
            message=message,
        )
        dialect = self._settings.speaks
        # Several answers to one prompt share its tokens.
        usage = UsageCounts(
            prompt_tokens=sum(len(job.prompt) for job in jobs if not job.choice),
            names_no_hits=dialect.names_no_hits,
        )
        half = self._worker.handover.half_of(body)
        if half is not None:
            jobs = [_halved(job, half) for job in jobs]
        elif source := self._worker.handover.source_of(body):
            jobs = [await self._pulled(job, source, engine) for job in jobs]
        run = _Run(engine, jobs, usage, dialect.habits.reports_last_answer)
        if half is None:
            return await self._send(request, body, run, form)
        missing = sum(
            len(job.prompt) - engine.cache.held_tokens(job.prompt, job.namespace) for job in jobs
        )
        async with self._worker.handover.taking_part(half, missing):
            return await self._send(request, body, run, form)

    async def _pulled(self, job: Job, source: str, engine: SimulatedEngine) -> Job:
        """Returns the job after fetching the blocks that another worker holds beyond this one's."""
        held = engine.cache.held_tokens(job.prompt, job.namespace)
        tokens = await self._worker.handover.pull(source, job.prompt, job.namespace, held)
        return replace(job, received_tokens=tokens)

    async def _send(
        self, request: web.Request, body: Generation, run: _Run, form: Form
    ) -> web.StreamResponse:
        if body.stream:
            return await self._stream(request, body, run, form)
        return await self._answer_whole(run, form)

    def _engine_for(self, request: web.Request) -> SimulatedEngine:
        named = None if self._settings.ignores_ranks else request.headers.get(_RANK_HEADER)
        try:
            return self._worker.pick_rank(named).engine
        except ValueError as error:
            raise bad_request(str(error)) from error

    async def _answer_whole(self, run: _Run, form: Form) -> web.Response:
        answers: list[list[int]] = [[] for _ in run.jobs]
        reasons: list[str | None] = [None for _ in run.jobs]

        async def collect(index: int, step: Step) -> None:
            answers[index].append(step.token)
            reasons[index] = step.finish_reason

        await run.to_end(collect)
        texts = map(self._tokens.text_of, answers)
        body = form.answer(list(zip(texts, reasons, strict=True)), run.usage)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _stream(
        self, request: web.Request, body: Generation, run: _Run, form: Form
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        await response.prepare(request)

        is_open: set[int] = set()

        async def send(index: int, step: Step) -> None:
            # engines send nothing, not even a role, before the first token
            if index not in is_open and (opening := form.opening(index)):
                await response.write(_server_sent(opening))
            is_open.add(index)
            text = self._tokens.text_of([step.token])
            await response.write(_server_sent(form.piece(index, text, step.finish_reason)))

        try:
            await run.to_end(send)
            if body.wants_usage_chunk:
                await response.write(_server_sent(form.closing(run.usage)))
            await response.write(b"data: [DONE]\n\n")
        except* ConnectionResetError:
            pass  # The client left; leaving `to_end` freed the blocks.
        return response


def _halved(job: Job, half: Half) -> Job:
    """Returns this worker's part of a job that is split between two workers."""
    if half.place:
        return replace(job, received_tokens=len(job.prompt))
    return replace(job, output_tokens=1)


def _server_sent(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
