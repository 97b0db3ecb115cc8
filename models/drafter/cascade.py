"""A cascade: a first drafter proposes a chain, and a second one checks it before the target sees any of it.

The second drafter verifies the first one's tokens as a target would: a token y that the first drew from q1 is accepted
with probability min(1, q2(y)/q1(y)), q2(y) where it is a point mass, and replaced by a draw from norm(max(q2 − q1, 0))
where it is not; from there on the second drafts alone, as it does behind the end of the first one's chain. Each token
is then a sample of the second one's own law, and q2 is what is handed on (recipes of cascades; 2211.17192, appendix).
Greedy drafting accepts y where it is the second one's choice.

With `num_checked` the first one's tokens behind that many accepted ones are trusted: they are handed on unchecked, with
the law that the first drew them from. With `trusted_match` so is all that was looked up by as long an ending of the
text: what follows a long match is right more often than a small second drafter knows. Where all of them are trusted, up
to the last that is asked for, the second is not asked at all; it reads those rows when its turn comes. `num_own` ends
a chain behind that many tokens which the second chose by itself: they cost more than what was looked up, and further
ones are worth less. Which of the two speaks for a token depends on the
committed text, the lengths of the first one's chains and the verdicts on tokens before it, so its law is the one
reported given all that came before, and verification by the target stays exact.

B batch, N drafted tokens, L captured layers, D hidden size, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from models.chain_checking import check_chain
from models.checkpoint import native
from models.drafter import accelerate_drafter
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.tree_drafting import Expander
from models.types import Draft, DraftState, TargetFeatures, probes
from models.unread import Unread
from models.vocab import DraftVocab


class CascadeState:
    """The states of both drafters, and the confirmed rows that the second has not read yet."""

    def __init__(self, first: DraftState, second: DraftState) -> None:
        self.first, self.second = first, second
        self.unread = Unread()

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.first.select(rows)
        self.second.select(rows)
        self.unread.select(rows)


class CascadeDrafter(nn.Module):
    """`second` checks what `first` proposes.

    Each is the drafter in the folder `first_export` or `second_export`, or without one what `first` or `second`
    describes (`_target_` and arguments). `num_checked` None checks all of the first one's tokens; `trusted_match` None
    trusts no match, and only drafters that look up have any; `num_own` None ends no chain early. `stage_tokens` is
    written by an export: the token ids that each stage can propose, None for all of them. Raises UserError for a
    number that is too small, a drafter that is not given, and a second one that cannot draft token by token.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        first: dict[str, Any] | None = None,
        second: dict[str, Any] | None = None,
        first_export: str | None = None,
        second_export: str | None = None,
        num_checked: int | None = None,
        trusted_match: int | None = None,
        num_own: int | None = None,
        stage_tokens: list[list[int] | None] | None = None,
    ) -> None:
        super().__init__()
        if num_checked is not None and num_checked < 0:
            raise UserError(f"drafter.model.num_checked is {num_checked}: it must be 0 or more, or null for all.")
        if trusted_match is not None and trusted_match < 1:
            raise UserError(f"drafter.model.trusted_match is {trusted_match}: it must be 1 or more, or null for none.")
        if num_own is not None and num_own < 1:
            raise UserError(f"drafter.model.num_own is {num_own}: it must be 1 or more, or null for no end.")
        vocabs = [vocab, vocab]
        if stage_tokens is not None:
            chosen = [None if ids is None else torch.tensor(ids) for ids in stage_tokens]
            vocabs = [DraftVocab(target.vocab_size, token_ids) for token_ids in chosen]
        self.first, self._first_model = _stage("first", first_export, first, target, vocabs[0])
        self.second, self._second_model = _stage("second", second_export, second, target, vocabs[1])
        if probes(self.first):
            raise UserError(f"{type(self.first).__name__} cannot be checked: it drafts trees, and probes the target.")
        if not hasattr(self.second, "expander"):
            raise UserError(f"{type(self.second).__name__} cannot check another: it does not draft from laws.")
        self.pretrained = _trained(self.first, first_export) and _trained(self.second, second_export)
        read = [tuple(map(target.layer_index, stage.capture_layers)) for stage in (self.first, self.second)]
        self.capture_layers: tuple[int, ...] = tuple(sorted({*read[0], *read[1]}))
        self._columns = [[self.capture_layers.index(layer) for layer in layers] for layers in read]
        trusts = num_checked is not None or trusted_match is not None
        self.vocab = self.second.vocab if not trusts else _either(self.first.vocab, self.second.vocab)
        self._num_checked, self._trusted_match, self._num_own = num_checked, trusted_match, num_own

    @property
    def export_arguments(self) -> dict[str, Any]:
        """Both drafters in place of their folders."""
        stages = {"first": self._first_model, "second": self._second_model}
        models = {name: m | getattr(getattr(self, name), "export_arguments", {}) for name, m in stages.items()}
        ids = [stage.vocab.token_ids for stage in (self.first, self.second)]
        tokens = [None if token_ids is None else token_ids.tolist() for token_ids in ids]
        return {"first_export": None, "second_export": None, **models, "stage_tokens": tokens}

    def accelerate(self) -> None:
        """Prepare for inference, for good, as both drafters do."""
        accelerate_drafter(self.first)
        accelerate_drafter(self.second)

    def new_state(self, batch_size: int, max_len: int) -> CascadeState:
        """Memory for requests of at most `max_len` rows, those of a draft included."""
        return CascadeState(self.first.new_state(batch_size, max_len), self.second.new_state(batch_size, max_len))

    def propose(
        self,
        state: CascadeState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """Take in the confirmed rows, let the first draft a chain of N tokens, and the second check and complete it.

        The second takes rows in when it is needed. A request that has filled its context gets a shorter draft then, or
        none.
        """
        first = self.first.propose(
            state.first,
            self._read_by(0, committed),
            num_speculative_tokens=num_speculative_tokens,
            sampling=sampling,
            random=random,
        )
        state.unread.add(self._read_by(1, committed))
        return check_chain(
            lambda: self._ask_second(state),
            self.second.vocab,
            first,
            num_speculative_tokens,
            num_checked=self._checked(first, num_speculative_tokens),
            num_own=self._num_own,
            sampling=sampling,
            random=random,
        )

    def _ask_second(self, state: CascadeState) -> Expander:
        """What the second drafter tells behind all that is confirmed."""
        expander: Expander = self.second.expander(state.second, state.unread.take())
        return expander

    def _checked(self, first: Draft, num_tokens: int) -> Tensor:
        """How many tokens of each of the first one's chains are checked: (B,)."""
        checked = torch.full((len(first.token_ids),), num_tokens if self._num_checked is None else self._num_checked)
        if self._trusted_match is not None and first.matched is not None:
            checked[first.matched >= self._trusted_match] = 0
        return checked

    def _read_by(self, stage: int, committed: TargetFeatures) -> TargetFeatures:
        """The rows with those of the captured states that a stage reads."""
        columns, hidden = self._columns[stage], committed.hidden
        if hidden is None or len(columns) == len(self.capture_layers):
            return committed
        parts = hidden.unflatten(-1, (len(self.capture_layers), -1))
        return replace(committed, hidden=parts[:, :, columns].flatten(2) if columns else None)


def _stage(
    name: str, folder: str | None, model: dict[str, Any] | None, target: Target, vocab: DraftVocab
) -> tuple[Any, dict[str, Any]]:
    if folder is None and model is None:
        raise UserError(f"The cascade has no {name} drafter: give drafter.model.{name}_export or drafter.model.{name}.")
    return native.load_or_build(folder, model or {}, target, vocab)


def _trained(drafter: Any, folder: str | None) -> bool:
    """Whether what is built need not be trained any more."""
    weights = isinstance(drafter, nn.Module) and any(True for _ in drafter.parameters())
    return folder is not None or not weights or getattr(drafter, "pretrained", False)


def _either(first: DraftVocab, second: DraftVocab) -> DraftVocab:
    """What at least one of two can propose."""
    if first.token_ids is None or second.token_ids is None:
        return DraftVocab(first.vocab_size)
    return DraftVocab(first.vocab_size, torch.cat([first.token_ids, second.token_ids]).unique())
