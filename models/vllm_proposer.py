"""Our drafters that read text alone, inside vLLM 0.32: its `custom_class` proposer.

    LLM(model=TARGET,
        speculative_config={"method": "custom_class", "model": "models.vllm_proposer.TextProposer",
                            "num_speculative_tokens": 4},
        additional_config={"draftsmith": "outputs/.../export"})

with this project's folder in vLLM's PYTHONPATH. vLLM hands such a proposer the token ids of the running requests, and
neither hidden states nor the requests' names (docs/engines.md): so it can run look-up, suffix automata and look-up
caches, and no drafter that reads the target's states.

B running requests, N drafted tokens, W slots.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from models.checkpoint import detect, native
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.target.load import load_skeleton
from models.text_drafting import DraftsFromText
from models.types import TargetFeatures

FOLDER = "draftsmith"  # the key of additional_config that names an export's folder


class TextProposer:
    """Proposes what the export in additional_config does.

    A request is known by its text: its state is the one that has seen the longest beginning of it. Raises UserError for
    an export of another target, or of a drafter that reads more than text.
    """

    def __init__(self, vllm_config: Any) -> None:
        folder = (vllm_config.additional_config or {}).get(FOLDER)
        if folder is None:
            raise UserError(f'Name the export\'s folder: additional_config={{"{FOLDER}": FOLDER}}.')
        model, layout = vllm_config.model_config, detect(Path(folder))
        kind = native.drafter_class(layout.read(Path(folder)).model)
        if not issubclass(kind, DraftsFromText):
            raise UserError(
                f"{folder!r} holds a {kind.__name__}, which reads more than text, and vLLM hands a custom proposer "
                "token ids alone."
            )
        self._drafter = layout.load(Path(folder), load_skeleton(model.model))
        self._size: int = vllm_config.speculative_config.num_speculative_tokens
        self._capacity: int = model.max_model_len
        self._random = RequestRandom([0], self._size + 1, purpose=1)
        self._known: list[tuple[list[int], Any]] = []

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Drafts of up to N tokens for B requests: none for one whose prompt is not read yet, or whose room is out.

        `token_ids` (B, W) holds the requests' text, the tokens in `sampled_token_ids` included, `num_tokens` (B,) its
        length.
        """
        before, self._known = self._known, []
        drafts = []
        for row, sampled in enumerate(sampled_token_ids):
            text = token_ids[row, : num_tokens[row]].tolist()
            drafts.append(self._draft(text, before) if sampled and len(text) < self._capacity else [])
        return drafts

    def _draft(self, text: list[int], before: list[tuple[list[int], Any]]) -> list[int]:
        fitting = [
            place for place, (seen, _) in enumerate(before) if len(seen) < len(text) and text[: len(seen)] == seen
        ]
        if fitting:
            seen, state = before.pop(max(fitting, key=lambda place: len(before[place][0])))
        else:
            seen, state = text[:1], self._drafter.new_state(1, self._capacity)
        new = torch.tensor([text[len(seen) - 1 :]])
        features = TargetFeatures(new[:, :-1], new[:, 1:], None, torch.tensor([new.shape[1] - 1]))
        draft = self._drafter.propose(
            state, features, num_speculative_tokens=self._size, sampling=SamplingParams(0.0), random=self._random
        )
        self._known.append((text, state))
        chain: list[int] = draft.token_ids[0, : int(draft.lengths[0])].tolist()
        return chain

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""
