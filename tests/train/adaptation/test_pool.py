"""Domains are told apart by their tokens, and requests go to the drafter that is worth most there."""

import math
import random

import pytest
import torch

from models.errors import UserError
from train.adaptation.domains import DomainDetector
from train.adaptation.pool import Pool, PoolSettings
from train.adaptation.records import Record

VOCAB = 20


def prompt(domain: str, rng: random.Random) -> list[int]:
    """Half of the tokens are any, the others the domain's own."""
    own = range(0, 8) if domain == "a" else range(8, 20)
    return [rng.choice(own) if rng.random() < 0.5 else rng.randrange(VOCAB) for _ in range(16)]


@pytest.fixture
def detector() -> DomainDetector:
    rng = random.Random(0)
    return DomainDetector(VOCAB, [(prompt(d, rng), d) for d in "ab" for _ in range(10)])


def test_scores_are_naive_bayes_by_loop() -> None:
    examples = [([1, 1, 2], "a"), ([3], "b"), ([1, 3, 3], "b")]
    found = DomainDetector(5, examples, smoothing=2.0).scores([1, 4])
    counts = {"a": [0, 2, 1, 0, 0], "b": [0, 1, 0, 3, 0]}
    common = [(sum(c[t] for c in counts.values()) + 1) / (7 + 5) for t in range(5)]
    for score, (domain, prior) in zip(found.tolist(), (("a", 1 / 3), ("b", 2 / 3)), strict=True):
        law = [(counts[domain][t] + 2 * common[t]) / (sum(counts[domain]) + 2) for t in range(5)]
        assert sum(law) == pytest.approx(1)
        assert score == pytest.approx(math.log(prior) + math.log(law[1]) + math.log(law[4]))
    with pytest.raises(UserError, match="no requests"):
        DomainDetector(5, [])


def test_new_prompts_are_told_apart(detector: DomainDetector) -> None:
    rng = random.Random(7)
    right = sum(detector.detect(prompt(d, rng)) == d for d in "ab" for _ in range(100))
    assert right > 180


def served(domain: str, member: str, tau: float, seconds: float, rng: random.Random) -> Record:
    ids = torch.tensor(prompt(domain, rng))
    nothing = torch.zeros(0)
    about = {"member": member, "rounds": 10.0, "emitted": 10 * tau, "seconds": seconds}
    empty = torch.zeros(0, 1)
    return Record(0, domain, len(ids), ids, nothing.long(), nothing.long(), nothing.long(), nothing.bool(), nothing,
                  empty.long(), empty, about)  # fmt: skip


WORTH = {("adapted", "a"): 2.5, ("adapted", "b"): 1.5, ("expert", "a"): 2.0, ("expert", "b"): 3.0}


def run(pool: Pool, count: int = 200) -> dict[str, list[str]]:
    rng, chosen = random.Random(3), {"a": [], "b": []}
    for number in range(count):
        domain = "ab"[number % 2]
        asked = prompt(domain, rng)
        name, member = pool.choose(asked, number)
        assert member == f"the {name}"
        chosen[domain].append(name)
        pool.served(name, served(domain, name, WORTH[name, domain], 1.0, rng))
    return chosen


def pool_of(detector: DomainDetector, **settings) -> Pool:
    members = {"adapted": "the adapted", "expert": "the expert", **({"b": "the b"} if settings.get("by") else {})}
    return Pool(members, dict.fromkeys(members, 0.1), detector, PoolSettings({}, **settings), depth=4)


def test_requests_go_to_the_best_of_their_domain_and_others_are_tried_at_times(detector: DomainDetector) -> None:
    chosen = run(pool_of(detector, explore=25))
    late = {domain: names[20:] for domain, names in chosen.items()}
    assert late["a"].count("adapted") > 0.8 * len(late["a"]) and late["b"].count("expert") > 0.8 * len(late["b"])
    assert "expert" in late["a"]


def test_the_score_weighs_quality_speed_and_resource(detector: DomainDetector) -> None:
    members = {"adapted": "x", "expert": "y"}
    settings = PoolSettings({}, quality=2.0, speed=0.5, resource=0.3)
    pool = Pool(members, {"adapted": 0.1, "expert": 0.4}, detector, settings, depth=4)
    detected = detector.detect(served("a", "adapted", 2.0, 1.0, random.Random(1)).token_ids.tolist())
    pool.served("adapted", served("a", "adapted", 2.0, 1.0, random.Random(1)))
    pool.served("expert", served("a", "expert", 3.0, 6.0, random.Random(1)))
    found = pool.scores(detected)
    assert found["adapted"] == pytest.approx(2 * 2 / 5 + 0.5 * 1 - 0.3 * 0.1)
    assert found["expert"] == pytest.approx(2 * 3 / 5 + 0.5 * (30 / 6) / 20 - 0.3 * 0.4)


def test_by_domain_the_expert_of_that_name_answers(detector: DomainDetector) -> None:
    pool, rng = pool_of(detector, by="domain"), random.Random(5)
    for number in range(30):
        asked = prompt("ab"[number % 2], rng)
        expected = "b" if detector.detect(asked) == "b" else "adapted"
        assert pool.choose(asked, number)[0] == expected


def test_a_restart_goes_on_the_same(detector: DomainDetector) -> None:
    first, second = pool_of(detector), pool_of(detector)
    run(first, 50)
    second.load_state(first.state())
    assert run(first, 60) == run(second, 60)


@pytest.mark.parametrize("wrong", [{"by": "size"}, {"speed": -1.0}, {"tries": 0}])
def test_senseless_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match=f"adaptation.pool.{next(iter(wrong))}"):
        PoolSettings({}, **wrong)


def test_an_expert_that_no_request_could_reach_is_refused() -> None:
    with pytest.raises(UserError, match=r"pool\.experts has 'adapted', which is the drafter that learns"):
        PoolSettings({"adapted": "FOLDER"})
    with pytest.raises(UserError, match=r"pool\.experts has 'proze': the domains that are told apart are code, prose"):
        PoolSettings({"prose": "FOLDER", "proze": "FOLDER"}, by="domain").check(["code", "prose"])
    PoolSettings({"fast": "FOLDER"}).check(["code", "prose"])  # by score any name will do
