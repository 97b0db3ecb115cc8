"""The model card of an export: what it is, what it learnt from, and what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from eval.adapted import report
from eval.measure import Measurement
from models.checkpoint import format_of, snippets
from models.checkpoint.native import Export

_DEFINITIONS = """Acceptance rate: accepted over tested tokens. τ: tokens emitted per target pass, the extra token
included. Speed-up: seconds per token, plain over speculative, in turns on one machine. In brackets: 95% bootstrap
intervals over prompts."""


_INT8 = "- Weights: int8 with a scale for each row of a matrix; loading turns them back into floating point.\n"


# Of the targets that come with the project or a package.
_LICENCES = {"tiny": "Apache-2.0", "smollm2": "Apache-2.0"}
_PLACES = {"tiny": "models/target/tiny", "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_TITLE = "## Measured"
_WHERE = "In our own engine, in chains of drafts."


def model_card(export: Export, measured: list[tuple[str, Measurement]]) -> str:
    """Markdown for the export's README.md; `measured` is empty before the measurement."""
    weights = _INT8 if export.int8 else ""
    return f"""# {export.name} drafter for {export.target["name"]}

A draft component for speculative decoding: it proposes tokens, the target checks them, and what comes out is what the
target alone would have said.

- Target: `{export.target["name"]}` (fingerprint `{export.target["fingerprint"]}`; loading against another one refuses).
  Its licence, which governs what may be done with both together: {_licence_of(export)}.
{_adapted(export)}- Trained on: {_learnt_from(export.provenance["data"])}.{_tree(export)}{_confidence(export)}
{weights}- Made by: {_made_by(export.provenance)}. The whole configuration is in `config.json`.

{_TITLE}

{figures(measured)}

## Use

    python eval/acceptance.py export=FOLDER

```python
from pathlib import Path
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.target import load_target

target = load_target(**native.read(Path("FOLDER")).target["load"])
drafter = native.load(Path("FOLDER"), target)
ids = target.encode("def main(")
print(target.decode(generate(target, [ids], DecodeSettings(), drafter).token_ids[0]))
```

In the files of vLLM, SGLang, transformers and others, where they have a place for such a drafter, with a card that says
how they load them:

    python train/export.py export=FOLDER format=NAME output=FOLDER2
"""


def _adapted(export: Export) -> str:
    found = report(export.target)
    if found is None:
        return ""
    place = f"`{export.target['load']['name_or_path'] or 'target/'}`, as a Hugging Face folder"
    if export.target["adapted"]["export"] == "separate":
        place = "`adapter/`, as a peft adapter that loading merges into the original"
    return f"- {found}\n  The adapted target is in {place}.\n"


def engine_card(export: Export, format_name: str, measured: str, folder: Path) -> str:
    """Markdown for an export in another engine's format; `measured` are the figures, as `figures` writes them."""
    module = format_of(format_name)
    use = module.USE
    target, load = export.target["name"] or "the target", export.target["load"]
    deepest = export.model.get("num_heads")  # no engine drafts deeper than there are heads
    tokens = min(export.num_speculative_tokens, deepest or export.num_speculative_tokens)
    if hasattr(module, "num_tokens"):  # a format whose drafts are of one length
        tokens = module.num_tokens(export)
    place = load.get("name_or_path") or _PLACES.get(load.get("source"), target)
    for part, value in zip(snippets.PARTS, (place, folder, tokens, tokens + 1), strict=True):
        use = use.replace(part, str(value))
    known = export.provenance or {}
    made = f"{_made_by(known)}. The whole configuration is in" if known else "another project; what is known is in"
    return f"""# {export.name} drafter for {target}, as {format_name}

A draft component for speculative decoding: it proposes tokens, the target checks them, and what comes out is what the
target alone would have said.

- Target: `{target}` (fingerprint `{export.target["fingerprint"]}`). Its licence: {_licence_of(export)}.
{_adapted(export)}- Drafter: `{export.model["_target_"].rpartition(".")[2]}`.
- Trained on: {_learnt_from(known["data"]) if known else "data that this folder does not tell"}.
- Made by: {made}
  `draftsmith.json`, which no engine reads.

{_TITLE}

{_WHERE} {measured}

## Use

{use}
Or in our own engine:

    python eval/acceptance.py export={folder}
"""


def measured_before(card: str) -> str:
    """The figures in an export's card."""
    found = card.partition(f"{_TITLE}\n")[2].partition("\n## ")[0].strip().removeprefix(_WHERE).strip()
    return found or "Not measured yet."


def with_note(card: str, note: str) -> str:
    """An export's card with a line above its figures, which are of another drafter; a foreign card has it first."""
    line = f"{note} What is measured below is of the drafter that it began with, not of this one."
    if f"{_TITLE}\n" not in card:
        return f"{line}\n\n{card}"
    return card.replace(f"{_TITLE}\n", f"{_TITLE}\n\n{line}\n", 1)


def _licence_of(export: Export) -> str:
    """That of the target; of one that was trained together with the drafter, that of the original."""
    original = (export.provenance or {}).get("config", {}).get("target")
    if "adapted" not in export.target or original is None:
        return licence(export.target["load"])
    name = export.target["adapted"]["original"]["name"]
    return f"that of the original, `{name}`, from which it was trained: {licence(original)}"


def licence(load: dict[str, Any]) -> str:
    """The licence of a target as far as it is known, from where it was loaded."""
    if load.get("source") in _LICENCES:
        return _LICENCES[load["source"]]
    folder = Path(str(load.get("name_or_path") or "")).expanduser()
    card = folder / "README.md"
    found = re.search(r"^license: *(\S.*)$", card.read_text(errors="replace"), re.M) if card.is_file() else None
    if found:
        return found[1]
    beside = next(
        (name for name in ("LICENSE", "LICENSE.txt") if load.get("name_or_path") and (folder / name).is_file()), ""
    )
    return f"in its {beside}" if beside else "unknown here; see where the target comes from"


def _made_by(provenance: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items() if version)
    return f"`{provenance['command']}`, revision {provenance['git_revision']}, {versions}"


def _tree(export: Export) -> str:
    if export.tree is None:
        return ""
    nodes, tokens = len(export.tree["parents"]), export.tree["expected_tokens"]
    return (
        f"\n- Draft tree: {nodes} nodes, the best for what was accepted of {len(export.tree['prompt_ids'])} validation "
        f"prompts;\n  {tokens:.2f} tokens expected per target pass. `decode.tree=calibrated` drafts it in place of a "
        "chain."
    )


def _confidence(export: Export) -> str:
    found = export.provenance.get("confidence")
    if found is None:
        return ""
    before, after = (
        "unknown" if found[key] is None else f"{found[key]:.3f}" for key in ("error_before", "error_after")
    )
    return (
        f"\n- Confidence head: calibration error {before} before the positions' temperatures, {after} after, on "
        f"{sum(found['tested'])} tokens\n  of validation prompts that fitted none. `decode.draft_length=estimate` ends "
        "drafts by it."
    )


def _learnt_from(data: dict[str, Any] | None) -> str:
    if data is None:
        return "nothing in this run; the drafter is measured as it came"
    whose = "the target's own" if data["settings"]["answers"] == "target" else "their given"
    settings = json.dumps(data["settings"])
    return f"{data['num_prompts']} prompts with {whose} answers (prompts `{data['prompts']}`, settings\n  `{settings}`)"


def figures(measured: list[tuple[str, Measurement]]) -> str:
    """A Markdown table of what was measured, with intervals."""
    if not measured:
        return "Not measured yet."
    lines = [
        "| temperature | draft tokens | acceptance rate | block efficiency τ | speed-up | prompts |",
        "|---|---|---|---|---|---|",
    ]
    for _, m in measured:
        s = m.summary()
        cells = [f"{s['temperature']:g}", str(s["num_speculative_tokens"])]
        for key in ("acceptance_rate", "block_efficiency", "speedup"):
            low, high = s[f"{key}_interval"]
            cells.append(f"{s[key]:.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {' | '.join(cells)} | {s['prompts']} |")
    return "\n".join([*lines, "", _DEFINITIONS])
