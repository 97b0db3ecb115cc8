"""Answers by an OpenAI-compatible server (vLLM, SGLang, llama.cpp and others) that serves the same target.

A server reads and writes tokens, and tells text. What a drafter is trained on must be the tokens: so the prompt goes
out as token ids, and what the server says that it read and wrote is held against our own tokenisation.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.asking import AnswerSettings, Row, answerable, context_ids, context_text, row_of
from data.completions import Client
from data.progress import Progress
from data.prompts import Prompt
from data.resumable import LoggedRows, run_keyed
from models.errors import UserError
from models.target import Target

LOG = "answers-by-prompt.jsonl"
_PROBE_TOKENS = 16
_LEAST_AGREEMENT = 0.5  # another dtype or engine changes near ties only; another model or template changes most tokens


@dataclass(frozen=True, slots=True)
class OpenAIGenerator:
    """Asks /completions of a server at `base_url` for every turn, `concurrency` prompts at a time.

    `model` is the server's name for the target; null takes the only one that it serves. The key, where it wants one, is
    in the environment's variable `api_key_env`. With `prompts` "token_ids" templates cannot differ; "text" is for
    servers that read nothing else. `extensions` asks for what vLLM and SGLang offer beyond OpenAI's own: the token ids
    that were read and written, our stop tokens, and no defaults from a generation config.

    Where the server's ids or counts of what it read or wrote are not ours, a row differs: `differing` "drop" leaves it
    out, "keep" trains on it. Ids that the server told are exact even where tokenising their text again gives others,
    which is counted as `retokenised` and no reason to drop them. Before the long work, the greedy answers to
    `check_prompts` prompts are compared with what the loaded target says; 0 skips that.
    """

    base_url: str
    model: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    prompts: str = "token_ids"
    extensions: bool = True
    differing: str = "drop"
    check_prompts: int = 4
    concurrency: int = 32
    timeout_s: float = 600.0
    retries: int = 8
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name, known in (("prompts", ("token_ids", "text")), ("differing", ("drop", "keep"))):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise UserError(f"data.generator.{name} is {value!r}: choose {' or '.join(known)}.")
        for name, least in (("concurrency", 1), ("retries", 0), ("check_prompts", 0)):
            if getattr(self, name) < least:
                raise UserError(f"data.generator.{name} is {getattr(self, name)}: it must be at least {least}.")
        for name in ("timeout_s", "first_wait_s", "longest_wait_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"data.generator.{name} is {getattr(self, name)}: it must be above 0.")
        self._client(threading.Event())

    def describe(self) -> dict[str, Any]:
        """What the answers depend on: not where the server is, nor how it is asked again."""
        return {
            "name": "openai",
            "model": self.model,
            "prompts": self.prompts,
            "extensions": self.extensions,
            "differing": self.differing,
        }

    def rows(self, target: Target, prompts: list[Prompt], settings: AnswerSettings, folder: Path) -> Iterable[Row]:
        """Answers to every turn, in the order of `prompts`, read from the log when asked for.

        A prompt whose turns are all answered is in the log, and is never asked again. Raises UserError where the server
        refuses, stays away, or does not serve this target.
        """
        ordered = {p.id: p for p in answerable(target, prompts, settings)}
        log = folder / LOG
        finished = LoggedRows(log)
        if all(id in finished for id in ordered):
            return self._kept(finished, prompts)
        stopping = threading.Event()
        server = _Server(target, self, self._client(stopping), settings)
        server.check(list(ordered.values())[: self.check_prompts])
        with Progress(f"answers of {server.model}", len(ordered)) as progress:
            logged = run_keyed(
                log,
                list(ordered),
                lambda id: server.answer(ordered[id]),
                workers=self.concurrency,
                stopping=stopping,
                done=progress.advance,
            )
        return self._kept(logged, prompts)

    def report(self, folder: Path) -> dict[str, Any]:
        """How many rows differed in which way, and how many tokens the server says it read and wrote."""
        logged = LoggedRows(folder / LOG)
        told: Counter[str] = Counter()
        for rows in logged.read(logged.keys):
            for row in rows:
                told["answers"] += 1
                told["prompt_tokens"] += row["loss_mask"].count(0)
                told["answer_tokens"] += row["loss_mask"].count(1)
                told.update(row["differs"])
                told["dropped"] += not self._keeps(row)
        names = ("answers", "prompt_tokens", "answer_tokens", "retokenised", "prompt", "answer", "empty", "dropped")
        return {name: told[name] for name in names}

    def _client(self, stopping: threading.Event) -> Client:
        key = os.environ.get(self.api_key_env)
        waits = (self.first_wait_s, self.longest_wait_s)
        return Client(self.base_url, key, self.timeout_s, self.retries, *waits, stopping)

    def _kept(self, logged: LoggedRows, prompts: list[Prompt]) -> Iterator[Row]:
        for rows in logged.read([p.id for p in prompts if p.id in logged]):
            for row in rows:
                if self._keeps(row):
                    yield {key: value for key, value in row.items() if key != "differs"}

    def _keeps(self, row: Row) -> bool:
        differs = set(row["differs"]) - {"retokenised"}
        return not differs or (self.differing == "keep" and "empty" not in differs)


class _Server:
    """One target behind one address."""

    def __init__(self, target: Target, how: OpenAIGenerator, client: Client, settings: AnswerSettings) -> None:
        self._target, self._how, self._client, self._settings = target, how, client, settings
        self._tokenizing = threading.Lock()  # a tokenizer is no thing for several threads at once
        self.model = self._served()

    def _served(self) -> str:
        names = [str(model.get("id")) for model in self._client.get("models").get("data", [])]
        wanted = self._how.model
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted not in names:
            asked = "data.generator.model is not set" if wanted is None else f"no model {wanted!r}"
            raise UserError(f"The server {self._how.base_url} serves {', '.join(names) or 'nothing'}: {asked}.")
        return wanted

    def check(self, prompts: list[Prompt]) -> None:
        """Raise UserError where greedy answers are mostly not what the loaded target says to the same prompts."""
        equal = total = 0
        for prompt in prompts:
            context = self._context(prompt, ())
            ids, _ = self._ask(prompt, (), context, temperature=0.0, most=_PROBE_TOKENS, seed=0)
            if ids:
                read = torch.tensor([context + ids], device=self._target.device)
                with torch.inference_mode():
                    said = self._target.head(self._target(read).last[0, len(context) - 1 : -1]).argmax(-1)
                equal += int((said == read[0, len(context) :]).sum())
                total += len(ids)
        if prompts and equal < _LEAST_AGREEMENT * max(1, total):
            raise UserError(
                f"The server's {self.model!r} says other things than the target {self._target.name!r}: {equal} of "
                f"{total} greedy tokens are its first choice. Serve the same weights, or set "
                "data.generator.check_prompts=0."
            )

    def answer(self, prompt: Prompt) -> list[Row]:
        """Rows of all turns of a prompt; each says in `differs` how the server's tokens are not ours."""
        target, settings = self._target, self._settings
        answers: tuple[str, ...] = ()
        rows = []
        for turn in range(len(prompt.turns)):
            context = self._context(prompt, answers)
            if len(context) > settings.longest_context(target):
                break
            most = min(settings.max_new_tokens, target.max_positions - len(context))
            seed = settings.seed_of(prompt, turn)
            ids, differs = self._ask(prompt, answers, context, temperature=settings.temperature, most=most, seed=seed)
            made = row_of(prompt, turn, context + ids, [0] * len(context) + [1] * len(ids))
            rows.append({**made, "differs": differs})
            with self._tokenizing:
                answers += (target.decode(ids),)
        return rows

    def _context(self, prompt: Prompt, answers: tuple[str, ...]) -> list[int]:
        with self._tokenizing:
            return context_ids(self._target, prompt, answers)

    def _ask(
        self, prompt: Prompt, answers: tuple[str, ...], context: list[int], *, temperature: float, most: int, seed: int
    ) -> tuple[list[int], list[str]]:
        """Token ids of one answer, and in what the server's tokens differ from ours."""
        as_text = self._how.prompts == "text"
        asked: dict[str, Any] = {
            "model": self.model,
            "prompt": context_text(self._target, prompt, answers) if as_text else context,
            "max_tokens": most,
            "temperature": temperature,
            "top_p": self._settings.top_p,
            "seed": seed,
        }
        if self._how.extensions:
            asked |= {
                "return_token_ids": True,
                "stop_token_ids": sorted(self._target.stop_token_ids),
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "add_special_tokens": prompt.continuation,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
        found = self._client.post("completions", asked)
        try:
            choice = found["choices"][0]
            text = str(choice["text"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"The server {self._how.base_url} answers without choices or text: {found!r}.") from error
        with self._tokenizing:
            return self._compared(choice, text, found.get("usage") or {}, context)

    def _compared(
        self, choice: dict[str, Any], text: str, usage: dict[str, Any], context: list[int]
    ) -> tuple[list[int], list[str]]:
        """The answer's ids, those told by the server where it tells any, and how they and the prompt's differ."""
        ours = self._tokenised(choice, text)
        told = choice.get("token_ids")
        ids = ours if told is None else [int(token) for token in told]
        stops = self._target.stop_token_ids
        differs = []
        if told is not None and _without_end(ids, stops) != _without_end(ours, stops):
            differs.append("retokenised")
        read = choice.get("prompt_token_ids")
        if (read is not None and read != context) or usage.get("prompt_tokens", len(context)) != len(context):
            differs.append("prompt")
        ends = {len(ids)} if told is not None else {len(ids), len(_without_end(ids, stops))}  # is the end mark counted?
        if usage.get("completion_tokens", len(ids)) not in ends:
            differs.append("answer")
        if not ids:
            differs.append("empty")
        return ids, differs

    def _tokenised(self, choice: dict[str, Any], text: str) -> list[int]:
        """Our token ids of an answer's text, with the token that ended it where one did."""
        stops = self._target.stop_token_ids
        ids = self._target.encode(text)
        if choice.get("finish_reason") != "stop" or (ids and ids[-1] in stops):
            return ids
        reason, own = choice.get("stop_reason"), getattr(self._target.tokenizer, "eos_token_id", None)
        end = reason if reason in stops else own if own in stops else min(stops, default=None)
        return ids if end is None else [*ids, end]


def _without_end(ids: list[int], stops: frozenset[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in stops else ids
