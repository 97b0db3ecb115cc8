"""The snippets of an export's card, run as they stand there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from conf.compose import ROOT
from eval.as_qwen2 import write_as_qwen2
from models.checkpoint import native
from models.target import Target, load_target
from models.vocab import DraftVocab
from tests.helpers.drafters import shaken
from tests.helpers.engines import VLLM_PYTHON, needs_vllm
from tests.helpers.formats import DISTILLED, EAGLE, EAGLE3, MEDUSA, MTP
from train import export

LAYERS = {"_target_": DISTILLED, "start": "first_layers", "num_layers": 5}
PROMPT = "def main("


def card_of(target: Target, folder: Path, name: str, model: dict[str, Any], load: dict[str, Any], *more: str) -> str:
    """The card of a drafter with next to no training, as the command writes it."""
    torch.manual_seed(0)
    drafter = shaken(native.build(model, target, DraftVocab(target.vocab_size)), amount=0.003)
    place = {"name": target.name, "fingerprint": target.fingerprint, "load": load}
    provenance = {"versions": {}, "data": None, "command": "python", "git_revision": "none"}
    native.save(drafter, native.Export("mine", model, place, 3, provenance), drafter.vocab, folder / "export", "")
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        overrides = [f"export={folder / 'export'}", f"format={name}", *more]
        export.job(hydra.compose("export", overrides=overrides))
    return (folder / name / "README.md").read_text()


def snippets(card: str, word: str) -> list[str]:
    """The blocks of Python in which `word` stands."""
    blocks = [block.partition("```")[0] for block in card.split("```python\n")[1:]]
    return [block for block in blocks if word in block]


def said(python: str, snippet: str, file: Path) -> str:
    """What the snippet prints, run as a file in the project's folder, as its reader would."""
    file.write_text(snippet)
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [python, str(file)], cwd=ROOT.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_transformers(tiny: Target, tmp_path: Path) -> None:
    card = card_of(tiny, tmp_path, "hf_causal_lm", LAYERS, {"source": "tiny"})
    (snippet,) = snippets(card, "assistant_model")
    ids = tiny.encode(PROMPT)
    plain = tiny.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=64)[0, len(ids) :].tolist()
    printed = said(sys.executable, snippet, tmp_path / "snippet.py")
    assert printed.startswith(PROMPT + tiny.decode(plain[:4])) and len(printed) > len(PROMPT) + 40


FORMATS = [
    ("hf_causal_lm", LAYERS),
    ("vllm_eagle", {"_target_": EAGLE}),
    ("vllm_eagle3", {"_target_": EAGLE3}),
    ("speculators_eagle3", {"_target_": EAGLE3}),
    ("vllm_medusa", {"_target_": MEDUSA, "num_heads": 3}),
    ("fasterdecoding_medusa", {"_target_": MEDUSA, "num_heads": 3}),
    ("mimo_mtp", {"_target_": MTP, "hide_first": True, "before_norm": True}),
]


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "model"), FORMATS, ids=[name for name, _ in FORMATS])
def test_vllm(name: str, model: dict[str, Any], tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each begins as the target does by itself; the second one of speculators says nothing."""
    folder = tmp_path_factory.mktemp("card")  # the test's own name may be one by which vLLM guesses
    target, load, more = tiny, {"source": "tiny"}, []
    if name == "mimo_mtp":
        write_as_qwen2(folder / "qwen2")
        load, more = {"source": "hf", "name_or_path": str(folder / "qwen2")}, ["stitch=true"]
        target = load_target(**load, device="cpu")
    found = snippets(card_of(target, folder, name, model, load, *more), "vllm")
    assert found
    beginning = target.decode(target.model.generate(
        torch.tensor([target.encode(PROMPT)]), do_sample=False, max_new_tokens=4
    )[0].tolist()).removeprefix(PROMPT)  # fmt: skip
    for place, snippet in enumerate(found):
        printed = said(VLLM_PYTHON, snippet, folder / "snippet.py")
        assert place > 0 or beginning in printed
