"""Structured text: drafts what the grammar of JSON or of Python's indentation forces, and leaves the rest to others.

The committed text is read by a grammar (`models.structured_text`), which says how it must go on: the rest of a key,
the next key of a schema, the colon, white space, closing brackets. Of the tokens of that continuation those are drafted
that stay the same whatever may come behind it, since the last ones may merge with what follows. A neural drafter reads
the forced tokens and goes on behind them; where nothing is forced the draft is its own. Without one it ends there.

A forced token is drawn from a law that knows no other, a point mass, and it is a proposal like any other: grammars err
where the target writes something else.

B batch, N drafted tokens, V target vocabulary, Vd draft vocabulary of the neural drafter.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.chain_drafting import draft_chain
from models.checkpoint import native
from models.drafter import accelerate_drafter
from models.errors import UserError
from models.json_schema import check_schema
from models.sampling import RequestRandom, SamplingParams
from models.structured_text import Forced, Grammar, JsonText, PythonText, common_start
from models.target import Target
from models.text_drafting import point_masses, select_texts, take_in
from models.tree_drafting import Expander
from models.types import Draft, DraftState, TargetFeatures
from models.vocab import DraftVocab

GRAMMARS = ("json", "python")
_TAIL = 4  # tokens that are decoded before new ones: a character has no more bytes
_BROKEN = "\ufffd"  # what decoders show for bytes that are not (yet) text


class StructuredRequest:
    """One request's text as its grammar has read it, and the last tokens of it."""

    def __init__(self, target: Target, grammar: Grammar) -> None:
        self.started = False
        self._target, self._grammar = target, grammar
        self._read: list[int] = []  # the last tokens that the grammar has read
        self._waiting: list[int] = []  # tokens of a character that is not complete

    def __deepcopy__(self, memo: dict[int, Any]) -> StructuredRequest:
        """A request that goes on by itself."""
        twin = copy.copy(self)  # what is replaced and never changed may be shared
        twin._grammar = copy.deepcopy(self._grammar, memo)
        return twin

    def append(self, token_ids: list[int]) -> None:
        """Take in the next tokens."""
        self.started = True
        tokens = [*self._read, *self._waiting, *token_ids]
        text = self._target.decode(tokens)
        if text.endswith(_BROKEN) and len(self._waiting) + len(token_ids) < _TAIL:
            self._waiting = [*self._waiting, *token_ids]
            return
        self._grammar.feed(text[len(self._target.decode(self._read)) :])
        self._read, self._waiting = tokens[-_TAIL:], []

    def continuation(self, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens that must follow."""
        if self._waiting:
            return []
        forced = self._grammar.forced()
        return forced_tokens(self._target, self._read, forced)[:num_tokens] if forced.text else []


def forced_tokens(target: Target, last: list[int], forced: Forced) -> list[int]:
    """The tokens of a forced text behind the tokens `last`, without those that may merge with what then comes.

    They are what all ways to go on have in common; each adds to the text a beginning of the forced one.
    """
    tail = target.decode(last)
    ways = [_continued(target, last, tail, forced.text + character) for character in forced.then]
    same = common_start(ways)
    whole = tail + forced.text
    fitting = (n for n in range(len(same), 0, -1) if whole.startswith(target.decode([*last, *same[:n]])))
    return same[: next(fitting, 0)]


def _continued(target: Target, last: list[int], tail: str, text: str) -> list[int]:
    """The tokens of `text` behind `last`, as the tokenizer cuts the two together, or else alone."""
    together = target.encode(tail + text)
    return together[len(last) :] if together[: len(last)] == last else target.encode(text)


class StructuredState:
    """The texts of the running requests, and the neural drafter's state."""

    def __init__(self, requests: list[StructuredRequest], neural: DraftState | None) -> None:
        self.requests, self.neural = requests, neural

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.requests = select_texts(self.requests, rows)
        if self.neural is not None:
            self.neural.select(rows)


class StructuredDrafter(nn.Module):
    """Drafts what `grammar` forces, json or python, and what a neural drafter says where it forces nothing.

    `schema` is a JSON schema, as a mapping or the name of a file. The neural drafter is the one in the folder `export`,
    or the one that `neural` describes (`_target_` and arguments), or none. `vocab` is that of the neural drafter; what
    is forced may lie outside. Raises UserError for a target without a tokenizer, an unknown grammar, a schema that is
    none, and a drafter that cannot draft token by token.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        grammar: str = "json",
        schema: dict[str, Any] | str | None = None,
        neural: dict[str, Any] | None = None,
        export: str | None = None,
    ) -> None:
        super().__init__()
        if target.tokenizer is None:
            raise UserError(f"Structured drafts need text, but target {target.name!r} has no tokenizer.")
        if grammar not in GRAMMARS:
            raise UserError(f"drafter.model.grammar is {grammar!r}: choose {' or '.join(GRAMMARS)}.")
        if schema is not None and grammar != "json":
            raise UserError("drafter.model.schema is for grammar=json: leave it out.")
        self._target = (target,)  # in a tuple: it is not a part of the drafter
        self._grammar, self._schema = grammar, _schema(schema)
        self._model: dict[str, Any] | None = None
        self.neural: Any = None
        if export is not None or neural is not None:
            self.neural, self._model = native.load_or_build(export, neural or {}, target, vocab)
        if self.neural is not None and not hasattr(self.neural, "expander"):
            raise UserError(f"{type(self.neural).__name__} cannot go on behind forced tokens: it drafts from no laws.")
        self.pretrained = export is not None or getattr(self.neural, "pretrained", False)
        self.capture_layers: tuple[int, ...] = () if self.neural is None else self.neural.capture_layers
        self.vocab: DraftVocab = DraftVocab(target.vocab_size) if self.neural is None else self.neural.vocab

    @property
    def export_arguments(self) -> dict[str, Any]:
        """The neural drafter and the schema themselves in place of folder and file."""
        neural = None if self._model is None else self._model | getattr(self.neural, "export_arguments", {})
        return {"export": None, "neural": neural, "schema": self._schema}

    def accelerate(self) -> None:
        """Prepare for inference, for good, as the neural drafter does."""
        if self.neural is not None:
            accelerate_drafter(self.neural)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Logits (..., V) of a law (..., V), which is what this drafter has for a hidden state."""
        return hidden.log()

    def new_state(self, batch_size: int, max_len: int) -> StructuredState:
        """Empty texts."""
        (target,) = self._target
        made = (JsonText(self._schema) if self._grammar == "json" else PythonText() for _ in range(batch_size))
        requests = [StructuredRequest(target, grammar) for grammar in made]
        return StructuredState(requests, None if self.neural is None else self.neural.new_state(batch_size, max_len))

    def propose(
        self,
        state: StructuredState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """Take in the confirmed rows, then draft the forced tokens, and the neural drafter's up to N behind them.

        Without one, and where a request has filled its context, `lengths` says how many are forced.
        """
        take_in(state.requests, committed)
        forced = [request.continuation(num_speculative_tokens) for request in state.requests]
        if self.neural is None:
            return point_masses(forced, num_speculative_tokens, committed.token_ids.device)
        expander = _ForcedExpander(self, self.neural.expander(state.neural, committed), forced)
        everything = DraftVocab(self.vocab.vocab_size)
        return draft_chain(expander, everything, num_speculative_tokens, sampling=sampling, random=random)


class _ForcedExpander:
    """Point masses as long as tokens are forced, and then what the neural drafter says."""

    def __init__(self, drafter: StructuredDrafter, neural: Expander, forced: list[list[int]]) -> None:
        counts = torch.tensor([len(tokens) for tokens in forced])
        self.room = None if neural.room is None else torch.maximum(neural.room, counts)
        self._drafter, self._neural, self._forced, self._depth = drafter, neural, forced, 0
        self._most = None if neural.room is None else int(neural.room.max())

    def root(self) -> Tensor:
        self._logits = self._neural.root()
        return self._told(self._logits)

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        self._depth += 1
        if self._most is None or self._depth < self._most:  # further on there is nothing but forced tokens
            self._logits = self._neural.below(token_ids, parents)
        return self._told(self._logits)

    def _told(self, logits: Tensor) -> Tensor:
        """The logits (B, 1, V) in place of the neural drafter's (B, 1, Vd)."""
        law = self._drafter.vocab.widen(logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)))
        for row, tokens in enumerate(self._forced):
            if self._depth < len(tokens):
                law[row] = 0.0
                law[row, 0, tokens[self._depth]] = 1.0
        return self._drafter.logits(law)


def _schema(given: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A schema as a mapping. Raises UserError where it is none or malformed, or a file cannot be read."""
    found: Any = given
    if isinstance(given, str):
        try:
            found = json.loads(Path(given).expanduser().read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"drafter.model.schema={given}: cannot read a JSON schema from it ({error}).") from error
    if found is not None and not isinstance(found, dict):
        raise UserError(f"drafter.model.schema is {found!r}: it must be a JSON schema, as a mapping.")
    if found is not None:
        check_schema(found, f"drafter.model.schema={given}" if isinstance(given, str) else "drafter.model.schema")
    return found
