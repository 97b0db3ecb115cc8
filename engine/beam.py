"""Beam search with drafts: exactly the beams of plain beam search, in fewer target passes.

A round puts behind every running beam what the drafter drafts for it, a chain or a tree, and runs the target over all
of that at once. Then beam steps are taken as plain beam search takes them, on the target's own logits, for as long as
those are known: as long as every beam that survives a step goes on by a token that was drafted behind its parent. So
drafts decide how many steps a pass is good for, and nothing else. The step at which a beam leaves its draft ends the
round; the caches of the survivors' parents are then gathered, each cut to the path that its survivor took.

Prompts of a batch are searched independently of each other. K beams of a prompt are neighbouring rows of the batch.

P prompts (still searched), K beams, B = P·K rows, N drafted tokens, L captured layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.beam_step import Beams, BeamSettings, Step, advance
from engine.draft_length import Fixed
from engine.loop import check_prompts, check_settings
from engine.settings import DecodeSettings
from models.cache import KVCache
from models.errors import UserError
from models.sampling import RequestRandom
from models.target import Target
from models.types import Draft, Drafter, DraftState, TargetFeatures, probes

Tokens = list[int]
Children = dict[tuple[int, int], int]  # of one row: node and token → the node behind


class Place(NamedTuple):
    """Where a beam stands: a row of the batch, and a node there; 0 is the row's pending token."""

    row: int
    node: int


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The K best answers to each prompt, best first (stop token included), their scores, and what they took.

    `passes` counts the target's passes, that over the prompts included; `plain_passes` those of plain beam search,
    which needs one for every step of the prompt that takes longest.
    """

    token_ids: list[list[Tokens]]
    scores: list[list[float]]
    passes: int
    plain_passes: int
    seconds: float


def beam_search(
    target: Target,
    prompts: list[Tokens],
    settings: DecodeSettings,
    beam_settings: BeamSettings,
    drafter: Drafter | None = None,
) -> BeamSearch:
    """Search the best answers to `prompts` (token ids) as one batch, with or without a drafter: they are the same.

    Of `settings` the limits, the stop tokens and what is drafted are used. Raises UserError for settings that beam
    search has no use for, and for prompts that cannot be answered.
    """
    check_prompts(target, prompts)
    check_settings(target, drafter, settings)
    _check(target, settings, beam_settings, drafter)
    started = time.perf_counter()
    with torch.inference_mode():
        search = _Search(target, prompts, settings, beam_settings, drafter)
        if prompts:
            search.prefill()
        while search.prompts:
            search.round()
    seconds = time.perf_counter() - started
    return BeamSearch(search.answers, search.scores, search.passes, max(search.steps, default=0), seconds)


def _check(target: Target, settings: DecodeSettings, beam_settings: BeamSettings, drafter: Drafter | None) -> None:
    if not settings.sampling.greedy or settings.sampling.adjusts:
        raise UserError("Beam search takes the target's own law: leave temperature, repetition_penalty and logit_bias.")
    if settings.stop_strings:
        raise UserError("Beam search ends at stop tokens: leave decode.stop out.")
    if settings.verification != "token":
        raise UserError("Beam search checks drafts in its own way: leave decode.verification out.")
    if not isinstance(settings.draft_length, Fixed | None):
        raise UserError("Beam search drafts as many tokens as it is told to: leave decode.draft_length out.")
    if probes(drafter):
        raise UserError(f"{type(drafter).__name__} probes the target, which beam search has no room for.")
    stop = _stop_tokens(target, settings)
    if max(2, 1 + len(stop)) > target.vocab_size:
        raise UserError(f"{target.vocab_size} tokens, {len(stop)} of which end an answer, are too few for beam search.")


class _Search:
    """The prompts in flight: K rows of the batch for each. `prompts` maps these groups to the caller's numbers."""

    def __init__(
        self,
        target: Target,
        prompts: list[Tokens],
        settings: DecodeSettings,
        beam_settings: BeamSettings,
        drafter: Drafter | None,
    ) -> None:
        self.target, self.given, self.settings, self.drafter = target, prompts, settings, drafter
        self.beam_settings, self.num_beams = beam_settings, beam_settings.num_beams
        self.capture = drafter.capture_layers if drafter is not None else ()
        self.width, self.depth = (settings.num_nodes, settings.depth) if drafter is not None else (0, 0)
        self.stop = _stop_tokens(target, settings)
        self.rooms = [min(settings.max_new_tokens, target.max_positions - len(p)) for p in prompts]
        self.prompts = list(range(len(prompts)))
        self.beams = Beams.start(len(prompts), self.num_beams, target.device)
        self.running: list[list[Tokens]] = [[[] for _ in range(self.num_beams)] for _ in prompts]
        self.answers: list[list[Tokens]] = [[[] for _ in range(self.num_beams)] for _ in prompts]
        self.scores: list[list[float]] = [[] for _ in prompts]
        self.steps = [0] * len(prompts)
        self.passes = 0
        self.cache: KVCache
        self.state: DraftState | None = None
        self.pending: Tensor  # (B,) the last token of each beam, which the target has not read yet
        self.committed: TargetFeatures

    def prefill(self) -> None:
        """Read the prompts, padded on the right, and take the step behind them."""
        lengths = [len(p) for p in self.given]
        most = max(n + room for n, room in zip(lengths, self.rooms, strict=True))
        self.cache = self.target.new_cache(len(self.given), most + self.width + 1)
        ids = torch.zeros(len(self.given), max(lengths), dtype=torch.int64)
        for row, prompt in enumerate(self.given):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        nodes = ids.to(self.target.device)
        out = self.target.step(nodes, self.cache, capture_layers=self.capture)
        same = range(self.num_beams)
        last = [[Place(row, n - 1) for _ in same] for row, n in enumerate(lengths)]
        places = self._replay(out.last, last, [{} for _ in lengths])
        if self.drafter is not None and self.prompts:
            rows = len(self.prompts) * self.num_beams
            self.state = self.drafter.new_state(rows, self.cache.capacity + self.settings.draft_rows + 1)
        self._commit(nodes, out.hidden, places, [list(range(place.node + 1)) for place in places])

    def round(self) -> None:
        """Draft for every running beam, run the target over the drafts, and take the steps that this is good for."""
        draft = self._draft()
        meant = [draft.token_ids.shape[1]] * len(self.pending) if draft.lengths is None else draft.lengths.tolist()
        nodes = torch.cat([self.pending[:, None], draft.token_ids[:, : max(meant)]], dim=1)  # (B, 1 + N)
        parents = nn.functional.pad(draft.parents[:, : max(meant)] + 1, (1, 0), value=-1)
        tree = parents if draft.branches else None
        out = self.target.step(nodes, self.cache, capture_layers=self.capture, parents=tree)
        above = parents.tolist()
        children = [
            {(p, token): node for node, (p, token) in enumerate(zip(ps[: n + 1], tokens[: n + 1], strict=True))}
            for ps, tokens, n in zip(above, nodes.tolist(), meant, strict=True)
        ]
        k = self.num_beams
        start = [[Place(row, 0) for row in range(g * k, (g + 1) * k)] for g in range(len(self.prompts))]
        places = self._replay(out.last, start, children)
        if self.state is not None and places:
            self.state.select([place.row for place in places])
        self._commit(nodes, out.hidden, places, [_path(above[place.row], place.node) for place in places])

    def _draft(self) -> Draft:
        """What the drafter says behind each beam; nothing without a drafter, or where one step is left."""
        left = max(self.rooms[p] - self.steps[p] for p in self.prompts) - 1
        if self.drafter is None or self.state is None or left < 1:
            nothing = self.pending.new_zeros(len(self.pending), 0)
            return Draft(nothing, nothing, None)
        drafter: Any = self.drafter  # `check_settings` has seen to it that it drafts trees, where one is wanted
        random = RequestRandom([0] * len(self.pending), self.width + 1, purpose=1, device=self.target.device)
        common = {"sampling": self.settings.sampling, "random": random}
        if self.settings.tree is not None:
            shape = {"shape": self.settings.tree, "children": "top"}
            tree_draft: Draft = drafter.propose_tree(self.state, self.committed, **shape, **common)
            return tree_draft
        num_tokens = min(self.depth, left)
        chain: Draft = drafter.propose(self.state, self.committed, num_speculative_tokens=num_tokens, **common)
        return chain

    def _replay(self, last: Tensor, places: list[list[Place]], children: list[Children]) -> list[Place]:
        """Take beam steps by the states `last` (B, 1 + N, D), from `places` on, until a beam leaves its draft.

        `children` (B,) finds the node behind a node by its token. Prompts whose search has ended leave. Returns for
        each beam that runs on where its last token's parent stands.
        """
        self.passes += 1
        going_on = list(range(len(self.prompts)))
        ended: set[int] = set()
        while going_on:
            at = torch.tensor([places[g] for g in going_on], device=last.device)  # (groups, K, 2)
            found = self._step(going_on, self.target.head(last[at[..., 0], at[..., 1]]))
            covered = []
            for group, parents, over in zip(going_on, found.parents.tolist(), found.ended.tolist(), strict=True):
                places[group] = [places[group][parent] for parent in parents]
                tokens = [beam[-1] for beam in self.running[self.prompts[group]]]
                nodes = [children[p.row].get((p.node, token)) for p, token in zip(places[group], tokens, strict=True)]
                if over:
                    ended.add(group)
                elif (inside := [node for node in nodes if node is not None]) and len(inside) == len(nodes):
                    places[group] = [Place(p.row, node) for p, node in zip(places[group], inside, strict=True)]
                    covered.append(group)
            going_on = covered
        left = [group for group in range(len(self.prompts)) if group not in ended]
        self.beams = self.beams.select(torch.tensor(left, dtype=torch.int64, device=last.device))
        self.prompts = [self.prompts[group] for group in left]
        return [place for group in left for place in places[group]]

    def _step(self, groups: list[int], logits: Tensor) -> Step:
        """One beam step of some prompts, by the logits (groups, K, V) behind their beams."""
        prompts = [self.prompts[group] for group in groups]
        lengths, rooms = [self.steps[p] for p in prompts], [self.rooms[p] for p in prompts]
        index = torch.tensor(groups, device=logits.device)
        beams = self.beams.select(index)
        step = advance(beams, logits, lengths, rooms, self.stop, self.beam_settings)
        self.beams.put(index, beams)
        lists = (step.parents, step.tokens, step.kept, step.candidate_parents, step.candidate_tokens, beams.finished)
        for p, parents, tokens, kept, above, behind, scores in zip(prompts, *(t.tolist() for t in lists), strict=True):
            running, answers, k = self.running[p], self.answers[p], self.num_beams
            self.answers[p] = [answers[i] if i < k else [*running[above[i - k]], behind[i - k]] for i in kept]
            self.running[p] = [[*running[parent], token] for parent, token in zip(parents, tokens, strict=True)]
            self.scores[p] = scores
            self.steps[p] += 1
        return step

    def _commit(self, nodes: Tensor, hidden: Tensor | None, places: list[Place], paths: list[list[int]]) -> None:
        """Let each beam have the caches of the row where it stands, and keep the nodes on its path."""
        if not places:
            return
        rows = [place.row for place in places]
        counts = torch.tensor([len(path) for path in paths])
        path = torch.zeros(len(paths), int(counts.max()), dtype=torch.int64)
        for row, kept in enumerate(paths):
            path[row, : len(kept)] = torch.tensor(kept)
        path = path.to(nodes.device)
        self.cache.select(rows)
        self.cache.commit(counts, path)
        last = [beam[-1] for prompt in self.prompts for beam in self.running[prompt]]
        self.pending = torch.tensor(last, device=nodes.device)
        tokens = nodes[rows].gather(1, path)
        following = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
        following.scatter_(1, (counts - 1)[:, None].to(nodes.device), self.pending[:, None])
        if hidden is not None:
            hidden = hidden[rows].gather(1, path[..., None].expand(-1, -1, hidden.shape[-1]))
        self.committed = TargetFeatures(tokens, following, hidden, counts)


def _stop_tokens(target: Target, settings: DecodeSettings) -> frozenset[int]:
    return target.stop_token_ids if settings.stop_token_ids is None else settings.stop_token_ids


def _path(parents: list[int], node: int) -> list[int]:
    """The nodes from the pending token, 0, down to `node`."""
    path = [node]
    while path[-1] > 0:
        path.append(parents[path[-1]])
    return path[::-1]
