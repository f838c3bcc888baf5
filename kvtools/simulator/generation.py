"""The endpoints that generate: their jobs for the engine, and the form of their answers."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from kvtools.simulator import requests
from kvtools.simulator.answers import AnswerForm, Choice, UsageCounts
from kvtools.simulator.anthropic_messages import MessageForm, MessagesRequest
from kvtools.simulator.block_transfer import TransferSide
from kvtools.simulator.completions import CompletionForm
from kvtools.simulator.engine import Job, SimulatedEngine, Step
from kvtools.simulator.hashing import CacheNamespace, PlacedItem
from kvtools.simulator.openai_responses import ResponseForm, ResponsesRequest
from kvtools.simulator.requests import ChatRequest, Completion, Generation
from kvtools.simulator.responses import AnswerWriter, ApiError, bad_request
from kvtools.simulator.tokens import ModelTokens
from kvtools.simulator.tool_calls import call_for
from kvtools.simulator.worker import SimulatedWorker

_DEFAULT_COMPLETION_TOKENS = 16  # the OpenAI API's own default for completions

# From here on a limit is one that agents set for any answer: the answer ends by itself.
_GENEROUS_LIMIT_TOKENS = 4096
_RANK_HEADER = "X-data-parallel-rank"

Sink = Callable[[int, Step], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Run:
    """The jobs of one request, and their total usage."""

    engine: SimulatedEngine
    jobs: Sequence[Job]
    usage: UsageCounts
    reports_last_answer: bool

    def choices(self) -> list[Choice]:
        """Returns an answer for each job, with nothing generated yet."""
        return [Choice(index, self.usage) for index in range(len(self.jobs))]

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
        return await self._answer(request, body, jobs, self._completion_form(body))

    async def chat(self, request: web.Request, body: ChatRequest) -> web.StreamResponse:
        """Answers POST /v1/chat/completions."""
        self.check_model(body.model)
        prompt = await self._of_chat(body)
        whole, items = self._tokens.with_images(body.messages, prompt)
        limit = body.max_completion_tokens or body.max_tokens
        jobs = self._jobs(request, body, whole, limit, items)
        is_shown = body.return_token_ids and self._settings.shows_token_ids
        shown = tuple(whole) if is_shown else None
        return await self._answer(request, body, jobs, self._completion_form(body, shown))

    async def _of_chat(self, body: ChatRequest) -> list[int]:
        """Returns the ids of a conversation."""
        if self._settings.ignores_token_ids:
            body = msgspec.structs.replace(body, kv_transfer_params=None)
        return await requests.of_chat(self._tokens, body)

    def _completion_form(
        self, body: Completion | ChatRequest, shown: tuple[int, ...] | None = None
    ) -> CompletionForm:
        is_chat = isinstance(body, ChatRequest)
        return CompletionForm(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=body.model or self._settings.model,
            chat=is_chat,
            ends_with_usage=body.wants_usage_chunk,
            call=call_for(body) if isinstance(body, ChatRequest) else None,
            prompt_token_ids=shown,
        )

    async def message(self, request: web.Request, body: MessagesRequest) -> web.StreamResponse:
        """Answers POST /v1/messages."""
        chat = body.as_chat()
        model = chat.model or self._settings.model
        form = MessageForm(id=f"msg_{uuid.uuid4().hex}", model=model, call=call_for(chat))
        return await self._converted(request, chat, form)

    async def response(self, request: web.Request, body: ResponsesRequest) -> web.StreamResponse:
        """Answers POST /v1/responses."""
        chat = body.as_chat()
        form = ResponseForm(
            id=f"resp_{uuid.uuid4().hex}",
            created=int(time.time()),
            model=chat.model or self._settings.model,
            call=call_for(chat),
        )
        return await self._converted(request, chat, form)

    async def _converted(
        self, request: web.Request, chat: ChatRequest, form: AnswerForm
    ) -> web.StreamResponse:
        self.check_model(chat.model)
        prompt = await self._of_chat(chat)
        jobs = self._jobs(request, chat, prompt, chat.max_tokens)
        return await self._answer(request, chat, jobs, form)

    def _jobs(
        self,
        request: web.Request,
        body: Generation,
        prompt: Sequence[int],
        limit: int | None,
        items: tuple[PlacedItem, ...] = (),
    ) -> list[Job]:
        """Returns one job per choice. Without a limit, or a generous one, it ends by itself."""
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
            ends = limit is None or limit >= _GENEROUS_LIMIT_TOKENS
            own = self._writer.length(self._writer.seed(prompt, choice))
            length = own if ends or limit is None else limit
            job = Job(
                prompt=prompt,
                output_tokens=min(length, room),
                ends_turn=ends and length <= room,
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
        form: AnswerForm,
    ) -> web.StreamResponse:
        engine = self._engine_for(request)
        dialect = self._settings.event_dialect
        # Several answers to one prompt share its tokens.
        usage = UsageCounts(
            prompt_tokens=sum(len(job.prompt) for job in jobs if not job.choice),
            names_no_hits=dialect.names_no_hits,
        )
        side = self._worker.transfer.side_of(body)
        if side is not None:
            jobs = [_halved(job, side) for job in jobs]
        elif source := self._worker.transfer.source_of(body):
            jobs = [await self._pulled(job, source, engine) for job in jobs]
        run = _Run(engine, jobs, usage, dialect.habits.reports_last_answer)
        if side is None:
            return await self._send(request, body, run, form)
        missing = sum(
            len(job.prompt) - engine.cache.held_tokens(job.prompt, job.namespace) for job in jobs
        )
        async with self._worker.transfer.taking_part(side, missing):
            return await self._send(request, body, run, form)

    async def _pulled(self, job: Job, source: str, engine: SimulatedEngine) -> Job:
        """Returns the job after fetching the blocks that another worker holds beyond this one's."""
        held = engine.cache.held_tokens(job.prompt, job.namespace)
        tokens = await self._worker.transfer.pull(source, job.prompt, job.namespace, held)
        return replace(job, received_tokens=tokens)

    async def _send(
        self, request: web.Request, body: Generation, run: _Run, form: AnswerForm
    ) -> web.StreamResponse:
        if body.stream:
            return await self._stream(request, run, form)
        return await self._answer_whole(run, form)

    def _engine_for(self, request: web.Request) -> SimulatedEngine:
        named = None if self._settings.ignores_ranks else request.headers.get(_RANK_HEADER)
        try:
            return self._worker.pick_rank(named).engine
        except ValueError as error:
            raise bad_request(str(error)) from error

    async def _answer_whole(self, run: _Run, form: AnswerForm) -> web.Response:
        choices = run.choices()

        async def collect(index: int, step: Step) -> None:
            choices[index].add(self._tokens.text_of([step.token]), step.finish_reason)

        await run.to_end(collect)
        body = form.whole(choices)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _stream(
        self, request: web.Request, run: _Run, form: AnswerForm
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        choices = run.choices()

        # engines send nothing, not even a role, before the first token
        async def send(index: int, step: Step) -> None:
            text = self._tokens.text_of([step.token])
            choices[index].add(text, step.finish_reason)
            for event in form.piece(choices[index], text):
                await response.write(event.encode())

        try:
            await run.to_end(send)
            for event in form.closing(choices):
                await response.write(event.encode())
        except* ConnectionResetError:
            pass  # The client left; leaving `to_end` freed the blocks.
        return response


def _halved(job: Job, side: TransferSide) -> Job:
    """Returns this worker's part of a job that is split between two workers."""
    if side.place:
        return replace(job, received_tokens=len(job.prompt))
    return replace(job, output_tokens=1)
