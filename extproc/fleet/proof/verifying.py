"""Asks workers for the tokens of golden requests, and reports which models' tokens match.

A worker is asked from the start, beside its requests: no request waits for the answer or fails
because of it. It is asked again later, sooner if its tokens differ, and at once if it lost its
cache, since it may have been restarted with another template.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.base.fault import WORKERS_AT_ONCE, Fault
from extproc.config import schema
from extproc.fleet.asking.polling import Client, Question
from extproc.fleet.records.shared import SharedByFleet
from extproc.fleet.records.worker import Worker
from extproc.proof.golden import (
    MAX_ANSWER_BYTES,
    GoldenRequest,
    NoTokenizeError,
    TokenizerSilentError,
    comparison,
    golden_for,
    golden_tokens,
    own_tokens,
    tokens_there,
)
from extproc.proof.golden_forms import (
    FormEncoder,
    OwnAnswer,
    OwnPrompt,
    Post,
    ids_there,
    is_answered,
    own_prompts,
    rival_shown,
    unseen,
    verdicts,
)
from extproc.proof.lookups import GRACE_SECONDS, MAX_WAITING
from extproc.proof.state import (
    NOT_ASKED,
    NOT_SEEN,
    OFF,
    STATES_SHOWN,
    Comparison,
    GoldenVerdict,
    Proof,
    TokenProof,
)
from extproc.proof.trust import Proofs
from extproc.requests.dialect import Dialect, dialect_of
from extproc.requests.prompt import FORM_NAMES, TOOLS, names_of
from extproc.tokenizing.remote_tokenizer_wire import PATH
from kvstate.feeds.backoff import Backoff
from kvstate.overlap import Prompt, Tokens

log = logging.getLogger("kvsteer.tokens")

# The limit for all golden requests of one worker.
ALL_SECONDS = 30.0

# Workers that are asked at the same time.
AT_ONCE = 16

# How long KVSteer's own tokens are cached: templates may write the date.
OURS_SECONDS = 60.0

# Tokens in a block of a worker that has not stored any yet; most engines have smaller ones.
USUAL_BLOCK_SIZE = 64

# A golden message holds one of so many numbers, so that hardly any worker has seen it before.
_NONCES = 1 << 40

# Differences and failures of one model that are logged, until its tokens match again.
MAX_SAID = 8


class Verifying:
    """Compares the tokens of golden requests with those of every worker that serves a model.

    encoders: KVSteer's tokenizers, by model. proofs: receives the results. model_of: returns the
    model that a worker serves, None while it is unknown. dialect_of: returns the dialect that a
    worker speaks, None while its engine is unknown. note_dialect: takes the dialect that a worker
    has shown instead.
    """

    def __init__(
        self,
        shared: SharedByFleet,
        encoders: Mapping[str, FormEncoder],
        proofs: Proofs,
        model_of: Callable[[Worker], str | None],
        dialect_of: Callable[[Worker], Dialect | None],
        note_dialect: Callable[[Worker, Dialect], None],
    ) -> None:
        self._times = times = shared.times
        self._table = shared.table
        self._models = models = shared.config.models
        self._dialect_of = dialect_of
        self._note_dialect = note_dialect
        self.encoders = {
            model.name: encoders[model.name]
            for model in models
            if model.verify != schema.OFF and model.name in encoders
        }
        self._model_of = model_of
        self._proofs = proofs
        self._chance = shared.chance
        self._monotonic = shared.monotonic
        self._own_tokens: dict[str, tuple[float, Sequence[GoldenRequest], list[Tokens | str]]] = {}
        self._logged: dict[str, set[tuple[object, ...]]] = {}
        self.question = Question("tokens", asyncio.Semaphore(AT_ONCE), times.tokens_again_seconds)

    @property
    def is_needed(self) -> bool:
        """Whether any model's tokens are compared."""
        return bool(self.encoders)

    def ask_now(self, worker: Worker) -> None:
        """Asks a worker at once, if it is asked at all: it may have changed."""
        worker.golden_questions.by_release = {}
        poll = worker.polls.get(self.question.name)
        if poll is not None:
            poll.ask_now()

    def expect(self, worker: Worker) -> None:
        """Notes that the tokens of a worker will be compared."""
        model = self._model_of(worker)
        if model is not None:
            worker.proof.serve(model)
            if model in self.encoders:
                worker.proof.expect()

    async def ask(self, client: Client, worker: Worker) -> float:
        """Asks a worker once; returns the seconds until it is asked again."""
        model, questions, now = self._model_of(worker), worker.golden_questions, self._monotonic()
        if model is None:
            return self._times.tokens_unknown_seconds
        self.expect(worker)
        encoder = self.encoders.get(model)
        if encoder is None:
            return self._times.tokens_again_seconds
        least = self._times.tokens_least_seconds
        if now - questions.at < least:
            return least - (now - questions.at)
        questions.at = now
        if questions.retries is None:
            questions.retries = Backoff(*self._times.tokens_retry_seconds, self._chance)
        try:
            async with asyncio.timeout(ALL_SECONDS):
                found = await self._compared(client, worker, model, encoder)
        except NoTokenizeError as error:
            self._take(worker, model, await self._uncompared(client, worker, model, str(error)))
        except (TokenizerSilentError, TimeoutError) as error:
            why = str(error) or "it takes too long to answer"
            self._proofs.uncompared(worker, why, for_now=True)
            return max(least, questions.retries.next_seconds())
        else:
            self._take(worker, model, found)
        questions.retries.reset()
        return self._pause_after(worker.proof)

    def first_seconds(self) -> float:
        """Returns the seconds until a worker is asked the first time."""
        return self._times.tokens_first_spread_seconds * len(self._table) * self._chance()

    def _pause_after(self, proof: TokenProof) -> float:
        times = self._times
        least, a_worker = times.tokens_again_seconds, times.tokens_again_spread_seconds
        if proof.differing:
            least, a_worker = times.tokens_different_seconds, times.tokens_different_spread_seconds
        return max(least, a_worker * len(self._table)) * (0.9 + 0.2 * self._chance())

    async def _post(
        self, client: Client, endpoint: str, asked: bytes, path: str = PATH
    ) -> tuple[int, bytes]:
        """Asks a worker one question.

        Raises:
            TokenizerSilentError: it does not answer.
        """
        seconds = self._times.tokens_answer_seconds
        try:
            return await client.post(endpoint, path, asked, seconds, MAX_ANSWER_BYTES + 1)
        except TimeoutError:
            raise TokenizerSilentError(f"no answer to {path} within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TokenizerSilentError(f"{path}: {type(error).__name__}") from None

    async def _compared(
        self, client: Client, worker: Worker, model: str, encoder: FormEncoder
    ) -> Comparison:
        """Returns the result of all golden requests; a new difference counts if found twice."""
        golden = golden_for(encoder, dialect_of(worker.engine))
        for _ in range(2):
            here = await self._ours_of(model, encoder, golden)
            here = _without_own(self._dialect_of(worker), golden, here)
            there = await tokens_there(
                lambda asked: self._post(client, worker.endpoint, asked), None, golden
            )
            found = comparison(golden_tokens(encoder, golden, here, there), encoder.text_of)
            found.forms.update(await self._compared_by_release(client, worker, model, encoder))
            if worker.proof.agrees(found):
                break
            self._own_tokens.pop(model, None)  # the date that a template wrote may be outdated
        return found

    async def _uncompared(
        self, client: Client, worker: Worker, model: str, reason: str
    ) -> Comparison | str:
        """Returns what a worker without a tokenizer shows, or why it shows nothing."""
        encoder = self.encoders[model]
        found = await self._compared_by_release(client, worker, model, encoder)
        unknown = dict.fromkeys(FORM_NAMES, GoldenVerdict(None, reason))
        return Comparison(0, {**unknown, **found}, reason) if found else reason

    async def _compared_by_release(
        self, client: Client, worker: Worker, model: str, encoder: FormEncoder
    ) -> Mapping[int, GoldenVerdict]:
        """Returns the verdicts on forms that releases read differently.

        A form that is the same is not asked for again until the worker may have changed: some
        engines compute an answer for it.
        """
        questions, dialect = worker.golden_questions, self._dialect_of(worker)
        if dialect is None:
            return {}
        if dialect != questions.dialect:
            questions.dialect, questions.by_release = dialect, {}
        known = sum(form for form, one in questions.by_release.items() if one.is_same)
        here = await asyncio.to_thread(own_prompts, encoder, dialect, known)

        async def post(path: str, body: bytes) -> tuple[int, bytes]:
            return await self._post(client, worker.endpoint, body, path)

        answers: Sequence[OwnAnswer] = []
        for own in here:
            try:
                answers = [*answers, (own, await ids_there(post, own.question, model))]
            except TokenizerSilentError:
                break
        shown = await asyncio.to_thread(rival_shown, encoder, dialect, answers)
        if shown is not None and self._table.has(worker):
            questions.dialect, answers = shown
            self._note_dialect(worker, questions.dialect)
        questions.by_release |= verdicts(answers, encoder.text_of, known)
        not_shown = [own for own, theirs in answers if theirs is None]
        await self._prove_by_stores(post, worker, model, encoder, not_shown)
        return questions.by_release

    async def _prove_by_stores(
        self,
        post: Post,
        worker: Worker,
        model: str,
        encoder: FormEncoder,
        not_shown: Sequence[OwnPrompt],
    ) -> None:
        """Sends messages of forms that no answer shows, and looks up what the worker stored.

        Not while tokens are known to differ: then it is no wonder if a prompt is not stored.
        """
        name, dialect, is_any_sent = worker.name, worker.golden_questions.dialect, False
        for own in not_shown:
            if dialect is None or worker.proof.differing or worker.proof.is_proved(own.forms):
                continue
            size = self._proofs.block_size(name) or USUAL_BLOCK_SIZE
            nonce = int(self._chance() * _NONCES)
            asked = await asyncio.to_thread(unseen, encoder, dialect, own, size, nonce)
            if asked is None:
                continue
            sent = self._proofs.note_golden(name, Prompt(model, asked.tokens), own.forms)
            if sent is None:
                continue
            try:
                is_sent = await is_answered(post, asked.question, model)
            except TokenizerSilentError:
                is_sent = False
            if is_sent:
                self._proofs.ended(sent)
                is_any_sent = True
            else:
                self._proofs.dropped(name, sent)
        if is_any_sent:
            await asyncio.sleep(GRACE_SECONDS)
            for _ in range(MAX_WAITING):
                self._proofs.look_up(name)
                await asyncio.sleep(0)

    async def _ours_of(
        self, model: str, encoder: FormEncoder, golden: Sequence[GoldenRequest]
    ) -> list[Tokens | str]:
        now = self._monotonic()
        at, asked, known = self._own_tokens.get(model, (now, (), []))
        if now - at >= OURS_SECONDS or asked != golden:
            known = await asyncio.to_thread(own_tokens, encoder, golden)
            self._own_tokens[model] = now, golden, known
        return known

    def _take(self, worker: Worker, model: str, found: Comparison | str) -> None:
        """Takes the result of golden requests, or why the worker tokenizes none."""
        if not self._table.has(worker):
            return
        if isinstance(found, str):
            self._proofs.uncompared(worker, found, for_now=False)
        else:
            self._proofs.compared(worker, found)
        self._say(worker, model)

    def _say(self, worker: Worker, model: str) -> None:
        """Logs each new result of a model once."""
        said, proof = self._logged.setdefault(model, set()), worker.proof
        known = proof.summary
        if known.proof is Proof.PROVED:
            if self.of_models()[model].state == Proof.PROVED:
                if (Proof.PROVED,) not in said and proof.compared:
                    log.info(
                        "model %s: its tokens match those of worker %s in %d golden requests",
                        model,
                        worker.name,
                        proof.compared,
                    )
                self._logged[model] = {(Proof.PROVED,)}
            return
        key = (known.proof, known.mismatch or known.reason)
        if key in said or len(said) >= MAX_SAID:
            return
        said.add(key)
        if known.proof is Proof.REFUTED:
            log.warning(
                "model %s: its tokens differ from those of worker %s: %s; routed approximately"
                " until they match: %s",
                model,
                worker.name,
                known.reason,
                ", ".join(names_of(proof.differing)),
            )
        else:
            log.info(
                "model %s: its tokens could not be compared with those of worker %s: %s;"
                " requests are still served",
                model,
                worker.name,
                known.reason,
            )

    def of_models(self) -> dict[str, "OfModel"]:
        """Returns what is known about every model, by name, in one pass over the workers."""
        found: dict[str, OfModel] = {}
        for _ in self._gathered(found):
            pass
        return found

    def _gathered(self, found: dict[str, "OfModel"]) -> Iterator[None]:
        """Puts what is known about every model there; yields wherever others may have a turn."""
        found.update((one.name, OfModel(one.name in self.encoders)) for one in self._models)
        for number, worker in enumerate(list(self._table), 1):
            if number % WORKERS_AT_ONCE == 0:
                yield
            model = found.get(self._model_of(worker) or "")
            if model is not None:
                state = worker.proof.state_text
                model.counts[state] += 1
                model.first.setdefault(state, worker.proof)

    def models_as_json(self) -> list[dict[str, Any]]:
        """Returns the answer of GET /models."""
        now = self._monotonic()
        return [
            {
                "model": name,
                **one.proof.as_json(now),
                "worker": one.proof.worker,
                "workers": {state: one.counts[state] for state in STATES_SHOWN},
            }
            for name, one in self.of_models().items()
        ]

    def faults(self) -> Iterator[Fault | None]:
        """Yields a fault for each model whose tokens are refuted, or could not be proved.

        That nobody has answered yet, as at the start, is none.
        """
        found: dict[str, OfModel] = {}
        yield from self._gathered(found)
        for name, one in found.items():
            proof = one.proof
            by = f" by worker {proof.worker}: {proof.summary.reason}" if proof.worker else ""
            if one.state == Proof.REFUTED:
                says = f"its tokens are found to differ{by}"
                yield Fault("tokens-differ", f"model {name}", says)
            elif one.state == Proof.UNPROVED and proof.summary.reason not in (NOT_ASKED, NOT_SEEN):
                yield Fault("tokens-unproved", f"model {name}", f"its tokens are not proved{by}")


class OfModel:
    """What is known about a model's tokens.

    is_compared: whether golden requests are. counts: the numbers of its workers, by state. first:
    for each state, the first worker's proof that has it.
    """

    def __init__(self, is_compared: bool) -> None:
        self._nobody = TokenProof()
        if is_compared:
            self._nobody.expect()
        self.counts: Counter[str] = Counter()
        self.first: dict[str, TokenProof] = {}

    @property
    def proof(self) -> TokenProof:
        """The proof that counts: of a worker that is refuted, else proved, else unproved."""
        order = (Proof.REFUTED, Proof.PROVED, Proof.UNPROVED, OFF)
        return next((self.first[one] for one in order if one in self.first), self._nobody)

    @property
    def state(self) -> str:
        """The state that counts."""
        return self.proof.state_text


def _without_own(
    dialect: Dialect | None, golden: Sequence[GoldenRequest], here: list[Tokens | str]
) -> list[Tokens | str]:
    """Returns the tokens of golden requests, without those that SGLang reads in its own way."""
    if dialect is None or dialect.sglang is None:
        return here
    return [
        "unsupported_tools" if asked.forms & TOOLS else one
        for asked, one in zip(golden, here, strict=True)
    ]


class VerifiedCollector(Collector):
    """Shows at every scrape which models' tokens are verified.

    of_models: `Verifying.of_models`.
    """

    def __init__(self, of_models: Callable[[], Mapping[str, OfModel]]) -> None:
        self._of_models = of_models

    def collect(self) -> Iterator[Metric]:
        """Yields the metric family, with a sample for each model and result."""
        family = GaugeMetricFamily(
            "kvsteer_model_verified",
            "1 for the state of a model's tokens: whether they are its workers' own",
            labels=["model", "result"],
        )
        for model, known in self._of_models().items():
            for result in STATES_SHOWN:
                family.add_metric([model, result], int(known.state == result))
        yield family
