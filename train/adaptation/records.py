"""What a served request teaches: every tested position with its context, the target's law there, and the draft.

A position is tested where a drafted token met its verdict (`engine.observer`). Its law is the one that the target gave
at the index before it; of V tokens the K likeliest are kept, and the mass of the others as one number. Laws are the
target's own at temperature 1, whatever the request was sampled at.

Records hold token ids, never text. In "hashes" a record on disk has a salted hash in place of the ids, so that nothing
can be read from it or learnt again; see docs/adaptation.md.

S tokens of a text, P tested positions, K kept tokens of a law, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.observer import Checked
from models.files import replacing, write_text

# What of a record tells the text: a token whose law has just these probabilities is one, and easily found.
_REVEALING = ("token_ids", "drafted", "law_ids", "law_probs", "chance")


@dataclass(frozen=True, slots=True)
class Record:
    """A request and its tested positions. `about` are plain values: what was measured while it was served."""

    request: int
    domain: str
    prompt_tokens: int
    token_ids: Tensor  # (S,) prompt and answer; empty where it was redacted
    place: Tensor  # (P,) index of the position in the text
    depth: Tensor  # (P,) how many drafted tokens stood between it and the committed text
    drafted: Tensor  # (P,) the token that was tested there
    accepted: Tensor  # (P,) bool
    chance: Tensor  # (P,) float32, Σ_x min(p, q), or where greedy whether it was the target's choice
    law_ids: Tensor  # (P, K) the target's likeliest tokens
    law_probs: Tensor  # (P, K) float32, their probabilities; the others share what is left
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def redacted(self) -> bool:
        """Whether the text is gone, so that nothing can be learnt from it."""
        return len(self.token_ids) == 0

    @property
    def labels(self) -> Tensor:
        """The tokens (P,) that the target said at the positions."""
        return self.token_ids[self.place]

    @property
    def acceptance_rate(self) -> float:
        """α: accepted over tested; nan where nothing was drafted."""
        return float(self.accepted.double().mean()) if len(self.accepted) else float("nan")

    @property
    def nbytes(self) -> int:
        """Memory of its tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their names."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}

    def hashed(self, salt: str) -> Record:
        """Without its text: a salted hash of the ids, from which only an equal request can be told, in their place."""
        digest = hashlib.sha256(salt.encode() + self.token_ids.numpy().tobytes()).hexdigest()
        nothing = {name: getattr(self, name)[:0] for name in _REVEALING}
        return replace(self, **nothing, about={**self.about, "hash": digest})


class Recorder:
    """An observer of the decode loop that notes every tested position of the requests of one `generate` call."""

    def __init__(self, prompts: list[list[int]], law_tokens: int) -> None:
        self._prompts, self._law_tokens = prompts, law_tokens
        self._lengths = [len(prompt) + 1 for prompt in prompts]  # the pass over the prompt gave one token
        self._found: list[list[tuple[Any, ...]]] = [[] for _ in prompts]

    def before_round(self) -> None:
        """Nothing is noted between rounds."""

    def checked(self, made: Checked) -> None:
        """Note what was tested."""
        for row, request in enumerate(made.requests):
            tested = list(made.tested(row))
            if tested:
                nodes, drafted, depths, accepted = zip(*tested, strict=True)
                probs, ids = top_law(made.logits[row, list(nodes)], self._law_tokens)
                tokens = made.draft.token_ids[row, list(drafted)].tolist()
                chances = made.verdict.expected[row, list(depths)].tolist()
                start = self._lengths[request]
                self._found[request] += [
                    (start + depth, depth, token, kept, min(1.0, chance), law_ids, law_probs)
                    for depth, token, kept, chance, law_ids, law_probs in zip(
                        depths, tokens, accepted, chances, ids, probs, strict=True
                    )
                ]
            self._lengths[request] += int(made.verdict.accepted[row]) + 1

    def record(self, index: int, answer: list[int], *, request: int, domain: str, about: dict[str, Any]) -> Record:
        """What the call's request `index` teaches, once its answer is known; what lies behind its end is left out."""
        prompt, text = self._prompts[index], [*self._prompts[index], *answer]
        found = [entry for entry in self._found[index] if entry[0] < len(text)]
        place, depth, drafted, accepted, chance, ids, probs = zip(*found, strict=True) if found else ((),) * 7
        empty = torch.zeros(0, self._law_tokens)
        return Record(
            request,
            domain,
            len(prompt),
            torch.tensor(text),
            torch.tensor(place, dtype=torch.int64),
            torch.tensor(depth, dtype=torch.int64),
            torch.tensor(drafted, dtype=torch.int64),
            torch.tensor(accepted, dtype=torch.bool),
            torch.tensor(chance, dtype=torch.float32),
            torch.stack(list(ids)) if found else empty.long(),
            torch.stack(list(probs)) if found else empty,
            about,
        )


def top_law(logits: Tensor, law_tokens: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens' probabilities in float32, and ids, of laws (P, V): (P, K) each, on the host."""
    law = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    probs, ids = law.topk(min(law_tokens, logits.shape[-1]), dim=-1)
    return probs.float().cpu(), ids.cpu()


class RecordLog:
    """Records on disk, a file each, written whole or not at all: what was served is known even after a kill.

    `persist` is "ids", or "hashes", with which the texts are in no file. The salt of the hashes is a secret that lies
    beside the folder, made when it is first needed, so that hashes of equal texts differ between sessions.
    """

    def __init__(self, folder: Path, persist: str = "ids") -> None:
        self._folder, self._persist = folder, persist

    def redacted(self, record: Record) -> Record:
        """The record without its text."""
        return record if record.redacted else record.hashed(self._salt())

    def write(self, record: Record) -> None:
        """Keep a record. Raises UserError where the disk refuses."""
        kept = record if self._persist == "ids" else self.redacted(record)
        told = {name: getattr(kept, name) for name in ("request", "domain", "prompt_tokens", "about")}
        with replacing(self._file(record.request)) as temporary:
            save_file(kept.tensors(), temporary, metadata={"record": json.dumps(told)})

    def read(self, request: int) -> Record | None:
        """The record of a request; None where there is none."""
        path = self._file(request)
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()["record"])
            return Record(**told, **{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def keep_only(self, wanted: Iterable[int]) -> None:
        """Delete the records of all other requests."""
        kept = {self._file(request).name for request in wanted}
        for path in self._folder.glob("*.safetensors"):
            if path.name not in kept:
                path.unlink()

    def _salt(self) -> str:
        path = self._folder.parent / "salt"
        if not path.exists():
            write_text(path, secrets.token_hex(16))
        return path.read_text()

    def _file(self, request: int) -> Path:
        return self._folder / f"{request:08d}.safetensors"
