"""A chain checked by another drafter: its exact law, by enumeration, and the law of what a target makes of it.

R drafts, N drafted tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.verify import Verdict, verify_block, verify_chain
from models import chain_checking
from models.chain_checking import check_chain
from models.rejection import try_child
from models.sampling import SamplingParams
from models.tree import chain_parents
from models.types import Draft
from models.vocab import DraftVocab
from tests.helpers.laws import Laws, behind, one_hot_laws, random_laws
from tests.helpers.verdicts import ALMOST_ONE, Drafts, bisect, emitted_by, off_by

VOCAB, LENGTH = 3, 3
EXACT, SEEN = 1e-12, 1e-3  # a law that is right, and one that is not
SAMPLED, GREEDY = SamplingParams(1.0), SamplingParams()


class Table:
    """An expander whose laws are given for every prefix."""

    room = None

    def __init__(self, laws: Laws, batch_size: int) -> None:
        self.laws, self.prefix = laws, torch.zeros(batch_size, 0, dtype=torch.int64)
        self.passes = 0

    def _told(self, prefix: Tensor) -> Tensor:
        num_tokens = prefix.shape[1]
        return behind(self.laws[: num_tokens + 1], prefix)[:, -1:].log()

    def root(self) -> Tensor:
        return self._told(self.prefix)

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        self.passes += 1
        self.prefix = torch.cat([self.prefix, token_ids], dim=1)
        return self._told(self.prefix)


class ScoringTable(Table):
    """Also tells what follows a whole chain at once."""

    def score_chain(self, token_ids: Tensor) -> Tensor:
        self.passes += 1
        self.scored = token_ids
        prefixes = [torch.cat([self.prefix, token_ids[:, : n + 1]], dim=1) for n in range(token_ids.shape[1])]
        return torch.cat([self._told(prefix) for prefix in prefixes], dim=1)

    def keep(self, num_tokens: int) -> None:
        self.prefix = torch.cat([self.prefix, self.scored[:, :num_tokens]], dim=1)


class Given:
    """Random numbers that were chosen beforehand."""

    device = "cpu"

    def __init__(self, *calls: Tensor) -> None:
        self.calls = list(calls)

    def uniform(self, columns: int) -> Tensor:
        return self.calls.pop(0)[:, :columns]


Change = Callable[[Draft, Draft, Tensor], Draft]  # first draft, checked draft, laws of the second along it


class Case:
    """What a first drafter may say, and a second one that checks it."""

    def __init__(
        self,
        first: Laws,
        second: Laws,
        *,
        point_masses: bool = False,
        said: int = LENGTH,
        num_checked: int | list[int] | None = None,
        num_own: int | None = None,
        table: type[Table] = Table,
        change: Change | None = None,
    ) -> None:
        chains = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
        laws = behind(first, chains)
        weight = laws.gather(2, chains[..., None]).prod(1).squeeze(1)
        self.chains, self.laws, self.weight = chains[weight > 0], laws[weight > 0], weight[weight > 0]
        self.second, self.point_masses, self.said, self.num_checked = second, point_masses, said, num_checked
        self.num_own, self.table, self.change = num_own, table, change
        self.expander: Any = None

    def draft(self, chain: Tensor, draws: Tensor, tests: Tensor, sampling: SamplingParams = SAMPLED) -> Draft:
        """Check the chains numbered `chain` (R,) with these numbers (R, N)."""
        lengths = None if self.said == LENGTH else torch.full((len(chain),), self.said)
        first = Draft(
            self.chains[chain], chain_parents(len(chain), LENGTH), None if self.point_masses else self.laws[chain],
            lengths,
        )  # fmt: skip
        self.expander = self.table(self.second, len(chain))
        random: Any = Given(draws, tests)
        made = check_chain(
            lambda: self.expander, DraftVocab(VOCAB), first, LENGTH, num_checked=self._checked(len(chain)),
            num_own=self.num_own, sampling=sampling, random=random,
        )  # fmt: skip
        if self.change is not None:
            made = self.change(first, made, behind(self.second, made.token_ids))
        return made

    def _checked(self, rows: int) -> Tensor:
        """For each row; a list is gone through over and over."""
        each = self.num_checked if isinstance(self.num_checked, list) else [self.num_checked]
        return torch.tensor([LENGTH if n is None else n for n, _ in zip(itertools.cycle(each), range(rows))])

    def all_drafts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One draft for every way to draw it: chain (R,), draws and tests (R, N), and how likely it is (R,)."""
        chain = torch.arange(len(self.chains))
        draws = torch.full((len(chain), LENGTH), 0.5, dtype=torch.float64)
        tests, weight = draws.clone(), self.weight

        def tokens(at: int, draw: Tensor, test: Tensor) -> Tensor:
            return self.draft(chain, put(draws, at, draw), put(tests, at, test)).token_ids[:, at]

        for at in range(LENGTH):
            half, zero, one = (torch.full_like(weight, value) for value in (0.5, 0.0, ALMOST_ONE))
            passed = tokens(at, half, zero)
            chance = bisect(lambda u, at=at, half=half, passed=passed: tokens(at, half, u) == passed, half)
            found = []
            for test, share in ((zero, chance), (one, 1 - chance)):
                below = [bisect(lambda u, x=x, t=test, at=at: tokens(at, u, t) < x, half) for x in range(1, VOCAB)]
                edges = torch.stack([zero, *below, torch.ones_like(zero)])
                for low, high in itertools.pairwise(edges):
                    found.append((share * (high - low), (low + high) / 2, test))
            kept = [mass > 0 for mass, _, _ in found]
            rows = torch.cat([keep.nonzero().squeeze(1) for keep in kept])
            draw, test = (torch.cat([f[n][k] for f, k in zip(found, kept, strict=True)]) for n in (1, 2))
            weight = weight[rows] * torch.cat([f[0][k] for f, k in zip(found, kept, strict=True)])
            draws, tests, chain = put(draws[rows], at, draw), put(tests[rows], at, test), chain[rows]
        return chain, draws, tests, weight

    def enumerate(self, target: Laws) -> tuple[Drafts, Tensor]:
        """The drafts that may come out, what is said of them and how likely each is; and their lengths (R,)."""
        chain, draws, tests, weight = self.all_drafts()
        draft = self.draft(chain, draws, tests)
        assert draft.probs is not None and (draft.lengths is None or self.num_own is not None)
        lengths = [LENGTH] * len(weight) if draft.lengths is None else draft.lengths.tolist()
        mass: dict[Any, float] = defaultdict(float)
        for tokens, probs, length, one in zip(
            draft.token_ids.tolist(), draft.probs.tolist(), lengths, weight.tolist(), strict=True
        ):
            mass[tuple(tokens), tuple(tuple(law) for law in probs), length] += one
        merged = torch.tensor([tokens for tokens, _, _ in mass])
        probs = torch.tensor([law for _, law, _ in mass], dtype=torch.float64)
        likely = torch.tensor(list(mass.values()), dtype=torch.float64)
        drafts = Drafts(likely, merged, probs, behind(target, merged), list(range(-1, LENGTH - 1)))
        return drafts, torch.tensor([length for _, _, length in mass])


def put(x: Tensor, column: int, values: Tensor) -> Tensor:
    x = x.clone()
    x[:, column] = values
    return x


def off_claim(drafts: Drafts, lengths: Tensor) -> float:
    """The most by which any token's chance, given what was said before it, differs from the law that is said of it."""
    worst = 0.0
    for at in range(LENGTH):
        groups: dict[Any, list[float]] = defaultdict(lambda: [0.0] * VOCAB)
        meant = lengths > at
        for tokens, probs, weight in zip(
            drafts.tokens[meant].tolist(), drafts.probs[meant].tolist(), drafts.weight[meant].tolist(), strict=True
        ):
            said = tuple(tuple(round(p, 11) for p in law) for law in probs[: at + 1])
            groups[tuple(tokens[:at]), said][tokens[at]] += weight
        for (_, said), masses in groups.items():
            worst = max([worst] + [abs(m / sum(masses) - q) for m, q in zip(masses, said[at], strict=True)])
    return worst


def token(p: Tensor, tokens: Tensor, q: Tensor | None, parents: Tensor, limits: Tensor, uniforms: Tensor) -> Verdict:
    return verify_chain(p, tokens, q, limits, uniforms)


def block(p: Tensor, tokens: Tensor, q: Tensor | None, parents: Tensor, limits: Tensor, uniforms: Tensor) -> Verdict:
    return verify_block(p, tokens, q, limits, uniforms)


def laws(seed: int, point_masses: bool) -> tuple[Laws, Laws, Laws]:
    """Of the target, the first and the second drafter."""
    generator = torch.Generator().manual_seed(seed)
    target, second = (random_laws(VOCAB, LENGTH + n, generator, zeros=0.15) for n in (1, 0))
    if point_masses:
        return target, one_hot_laws(VOCAB, LENGTH, generator), second
    return target, random_laws(VOCAB, LENGTH, generator, zeros=0.15), second


CASES: list[dict[str, Any]] = [
    {},
    {"num_checked": 1},
    {"num_checked": 2},
    {"num_checked": 0, "said": 2},
    {"said": 2},
    {"said": 2, "num_checked": 1},
    {"said": 0},
    {"table": ScoringTable},
    {"table": ScoringTable, "num_checked": 2},
    {"num_own": 1},
    {"num_own": 2, "num_checked": 1},
    {"num_own": 1, "num_checked": 1, "said": 2},
    {"num_own": 1, "said": 0},
    {"num_own": 2, "said": 1, "table": ScoringTable},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("point_masses", [False, True], ids=["laws", "point masses"])
def test_what_is_said_of_a_draft_is_its_law_and_the_targets_law_comes_out(
    point_masses: bool, options: dict[str, Any]
) -> None:
    target, first, second = laws(3, point_masses)
    drafts, lengths = Case(first, second, point_masses=point_masses, **options).enumerate(target)
    assert float(drafts.weight.sum()) == pytest.approx(1, abs=EXACT)
    assert off_claim(drafts, lengths) < 1e-10  # rounded to 11 digits
    for verify, whole in ((token, False), (block, True)):
        emitted = emitted_by(target, drafts, verify, limits=lambda *_: lengths, block=whole)
        assert off_by(emitted, target) < EXACT


def test_a_chain_checked_whole_is_a_sample_of_the_second_drafter() -> None:
    """Jointly, whatever the first one said, and however long."""
    for point_masses, said in itertools.product([False, True], range(LENGTH + 1)):
        target, first, second = laws(4, point_masses)
        drafts = Case(first, second, point_masses=point_masses, said=said).enumerate(target)[0]
        torch.testing.assert_close(drafts.probs, behind(second, drafts.tokens), atol=EXACT, rtol=0)
        likely = drafts.probs.gather(2, drafts.tokens[..., None]).prod(1).squeeze(1)
        torch.testing.assert_close(drafts.weight, likely, atol=EXACT, rtol=0)


@pytest.mark.parametrize("num_own", [None, 1, 2])
@pytest.mark.parametrize("num_checked", [None, 0, 1, 2])
@pytest.mark.parametrize("table", [Table, ScoringTable])
def test_a_draft_is_the_same_alone_as_in_a_batch(
    table: type[Table], num_checked: int | None, num_own: int | None
) -> None:
    """Alone, a request often gets the end of the chain without a further question."""
    _, first, second = laws(5, True)
    case = Case(first, second, point_masses=True, num_checked=num_checked, num_own=num_own, table=table)
    chain, draws, tests, _ = case.all_drafts()
    for sampling in (SAMPLED, GREEDY):
        together = case.draft(chain, draws, tests, sampling)
        for row in range(len(chain)):
            alone = case.draft(*(x[row : row + 1] for x in (chain, draws, tests)), sampling)
            length, as_alone = (
                LENGTH if d.lengths is None else int(d.lengths[r]) for d, r in ((together, row), (alone, 0))
            )
            assert length == as_alone
            assert torch.equal(alone.token_ids[0, :length], together.token_ids[row, :length])
            if together.probs is not None and alone.probs is not None:
                torch.testing.assert_close(alone.probs[0, :length], together.probs[row, :length], atol=0, rtol=0)
            else:  # not a law was needed: the first one's point masses are handed on as they are
                assert alone.probs is None
                if together.probs is not None:
                    assert num_checked == 0
                    assert (together.probs[row].gather(1, alone.token_ids[0][:, None]) == 1).all()


def greedy_by_loop(
    chain: list[int], said: int, second: Laws, num_checked: int | None, num_own: int | None = None
) -> list[int]:
    """Follow the chain while it is the second one's choice, or trusted; then that one's own choices."""
    made: list[int] = []
    follows, own = True, 0
    for at in range(LENGTH):
        if own == num_own:
            break
        choice = int(second[at][tuple(made)].argmax())
        follows = follows and at < said
        if follows and (num_checked is None or at < num_checked):
            follows = chain[at] == choice
        made.append(chain[at] if follows else choice)
        own += not follows
    return made


@pytest.mark.parametrize("table", [Table, ScoringTable])
@pytest.mark.parametrize("said", range(LENGTH + 1))
@pytest.mark.parametrize("num_own", [None, 1, 2])
@pytest.mark.parametrize("num_checked", [None, 0, 1, 2])
def test_greedy_drafts_are_those_of_a_loop(
    num_checked: int | None, num_own: int | None, said: int, table: type[Table]
) -> None:
    _, first, second = laws(6, False)
    case = Case(first, second, point_masses=True, said=said, num_checked=num_checked, num_own=num_own, table=table)
    nothing = torch.zeros(len(case.chains), LENGTH)
    draft = case.draft(torch.arange(len(case.chains)), nothing, nothing, GREEDY)
    assert draft.probs is None
    expected = [greedy_by_loop(chain, said, second, num_checked, num_own) for chain in case.chains.tolist()]
    lengths = [LENGTH] * len(expected) if draft.lengths is None else draft.lengths.tolist()
    made = [tokens[:length] for tokens, length in zip(draft.token_ids.tolist(), lengths, strict=True)]
    assert made == expected


@pytest.mark.parametrize("said", range(LENGTH + 1))
def test_rows_are_checked_as_far_as_each_is_meant_to_be(said: int) -> None:
    _, first, second = laws(6, False)
    case = Case(first, second, point_masses=True, said=said, num_checked=[2, 0, LENGTH])
    nothing = torch.zeros(len(case.chains), LENGTH)
    draft = case.draft(torch.arange(len(case.chains)), nothing, nothing, GREEDY)
    each = zip(case.chains.tolist(), itertools.cycle([2, 0, None]))
    assert draft.token_ids.tolist() == [greedy_by_loop(chain, said, second, checked) for chain, checked in each]


@pytest.mark.parametrize(
    ("table", "num_checked", "passes"),
    [(Table, None, 2), (ScoringTable, None, 1), (Table, 1, 0), (ScoringTable, 1, 0), (Table, 2, 1), (Table, 0, 0)],
)
def test_a_chain_that_passes_costs_few_steps(table: type[Table], num_checked: int | None, passes: int) -> None:
    """A second drafter that reads chains at once takes one pass, and none is taken for trusted tokens."""
    _, first, second = laws(7, True)
    choice: list[int] = []
    for law in second:
        choice.append(int(law[tuple(choice)].argmax()))
    case = Case(first, second, point_masses=True, num_checked=num_checked, table=table)
    case.chains = torch.tensor([choice])
    nothing = torch.zeros(1, LENGTH)
    assert case.draft(torch.tensor([0]), nothing, nothing, GREEDY).token_ids.tolist() == [choice]
    assert case.expander.passes == passes


# ---- what the enumeration must see ----


def first_law_for_the_second(first: Draft, made: Draft, second: Tensor) -> Draft:
    return replace(made, probs=behind(laws(3, False)[1], made.token_ids))


def second_law_for_unchecked_tokens(first: Draft, made: Draft, second: Tensor) -> Draft:
    return replace(made, probs=second)


def correction_from_the_second(law: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    chance, _, overlap = try_child(law, tokens, q)
    return chance, law, overlap


def accepted_the_wrong_way_round(law: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    chance, left, overlap = try_child(law, tokens, q)
    return 1 / chance, left, overlap


@pytest.mark.parametrize(
    ("change", "options"),
    [(first_law_for_the_second, {}), (second_law_for_unchecked_tokens, {"num_checked": 1})],
)
def test_a_wrong_report_is_noticed(change: Change, options: dict[str, Any]) -> None:
    target, first, second = laws(3, False)
    drafts, lengths = Case(first, second, change=change, **options).enumerate(target)
    assert off_claim(drafts, lengths) > SEEN
    assert off_by(emitted_by(target, drafts, token), target) > SEEN


@pytest.mark.parametrize("mistake", [correction_from_the_second, accepted_the_wrong_way_round])
def test_a_wrong_check_is_noticed(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_checking, "try_child", mistake)
    target, first, second = laws(3, False)
    drafts, lengths = Case(first, second).enumerate(target)
    assert off_claim(drafts, lengths) > SEEN
    assert off_by(emitted_by(target, drafts, token), target) > SEEN


def test_ending_a_chain_before_the_rejected_token_is_noticed() -> None:
    """A length that looks at the value it cuts: what the second would have said in its place is never tested."""
    target, first, second = laws(3, True)
    drafts, lengths = Case(first, second, point_masses=True, num_own=1).enumerate(target)
    shorter = torch.where(lengths < LENGTH, lengths - 1, lengths)
    emitted = emitted_by(target, drafts, token, limits=lambda *_: shorter)
    assert off_by(emitted, target) > SEEN
