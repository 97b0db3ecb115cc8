"""Sessions over random targets: streams of random prompts, and drafters that are quick to build."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import torch

from data.stdlib import Document, documents
from data.streams import Request, Stream
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, prompts
from train.adaptation.domains import DomainDetector
from train.adaptation.drift import Drift
from train.adaptation.guard import Guard, GuardSettings
from train.adaptation.learner import Learner, Updates
from train.adaptation.pool import ADAPTED, Pool, PoolSettings
from train.adaptation.records import Record, Recorder, RecordLog
from train.adaptation.regime import LossSettings, OptimizerSettings
from train.adaptation.replay import ReplayBuffer
from train.adaptation.sections import WhenSettings
from train.adaptation.session import Parts, Session
from train.adaptation.versions import Versions

EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}
LOSS = {"distill": 1.0, "task": 0.1, "steps": "all", "num_steps": 3, "position_decay": 1.0, "chunk_rows": 64}
DECODE = DecodeSettings(8, 3, stop_token_ids=frozenset())
OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0, "warmup_steps": 2}


def few_documents() -> list[Document]:
    """A part of the standard library's documents, from which the preset streams are made in less time."""
    topics = [document for document in documents() if document.name.startswith("topics/")]
    return [*itertools.islice(documents("test"), 12), *itertools.islice(documents("validation"), 12), *topics]


def tiny_export(target: Target, folder: Path) -> Path:
    """An EAGLE drafter of the bundled target as it is built, over a few tokens."""
    torch.manual_seed(0)
    vocab = DraftVocab(target.vocab_size, torch.arange(300))
    drafter = native.build(EAGLE, target, vocab)
    described = native.Export(
        "eagle", EAGLE, {"name": "tiny", "fingerprint": target.fingerprint, "load": {"source": "tiny"}}, 3, {}
    )
    native.save(drafter, described, vocab, folder, "card")
    return folder


def records_of(
    target: Target, drafter: Any, asked: list[list[int]], decode: DecodeSettings, law_tokens: int = 8
) -> list[Record]:
    """What these prompts teach, served as one batch."""
    recorder = Recorder(asked, law_tokens)
    made = generate(target, asked, decode, drafter, observer=recorder)
    return [recorder.record(i, a, request=i, domain="some", about={}) for i, a in enumerate(made.token_ids)]


def learner_of(drafter: Any, target: Target, lora: Any = None, seed: int = 0, **changes: Any) -> Learner:
    """A learner with the settings of these tests."""
    updates = Updates(**{"every": 2, "steps": 2, "requests": 4, "average": 0.0, **changes.pop("updates", {})})
    loss = LossSettings(**{**LOSS, **changes.pop("loss", {})})
    return Learner(
        drafter, target, updates, loss, OptimizerSettings(**{**OPTIMIZER, **changes}), lora, depth=3, seed=seed
    )


def random_stream(vocab_size: int, count: int = 10) -> Stream:
    """Two domains of random prompts, and two held-out ones of each."""
    asked = prompts([4 + i % 5 for i in range(count)], vocab_size, seed=1)
    held = prompts([5] * 4, vocab_size, seed=2)
    requests = [Request(ids, "old" if i < count // 2 else "new") for i, ids in enumerate(asked)]
    return Stream(requests, [Request(ids, "old" if i < 2 else "new") for i, ids in enumerate(held)])


def taught(target: Target, stream: Stream, steps: int = 40) -> dict[str, torch.Tensor]:
    """Weights of a drafter that has learnt the held-out old requests, so that there is something to lose."""
    drafter = build_shaken(EAGLE, target, DraftVocab(target.vocab_size), seed=3)
    records = records_of(target, drafter, stream.of("old"), DECODE)
    learner = learner_of(copy.deepcopy(drafter), target, updates={"steps": steps})
    learner.update(records, ReplayBuffer(4, "reservoir"))
    return learner.weights()


def session_of(
    target: Target,
    folder: Path,
    stream: Stream,
    *,
    guard: GuardSettings | None = None,
    lora: Any = None,
    weights: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> Session:
    """A session whose parts are made anew, as a restarted process does; with `weights` as the drafter's at first."""
    drafter = build_shaken(EAGLE, target, DraftVocab(target.vocab_size), seed=3)
    drafter.load_state_dict(weights or drafter.state_dict())
    guard_settings = guard or GuardSettings(max_loss=1.0, stop_loss=1.0, pause=2)
    learner = learner_of(copy.deepcopy(drafter), target, lora, **changes.pop("learner", {}))
    described = native.Export(
        name="some", model=EAGLE, target={"name": target.name, "fingerprint": target.fingerprint, "load": {}},
        num_speculative_tokens=3, provenance={},
    )  # fmt: skip
    examples = [(request.token_ids, request.domain) for request in stream.held_out]
    serving = copy.deepcopy(drafter)
    parts = Parts(
        target=target,
        serving=serving,
        frozen=drafter,
        learner=learner,
        buffer=changes.pop("buffer", ReplayBuffer(4, "reservoir")),
        log=changes.pop("log", RecordLog(folder / "records")),
        drift=Drift(3, 0.5, 3.0),
        guard=Guard(guard_settings, target, stream.of("old"), DECODE),
        versions=Versions(folder, described, "card", keep=2),
        pool=Pool({ADAPTED: serving}, {ADAPTED: 0.1}, DomainDetector(target.vocab_size, examples), PoolSettings({}), 3),
        decode=DECODE,
        law_tokens=8,
        when=changes.pop("when", None) or WhenSettings(),
        updates=learner.updates,
        **changes,
    )
    return Session(parts, stream, folder)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two drafters have the same weights, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
