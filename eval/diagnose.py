"""Say why acceptance is low although training went well.

    python eval/diagnose.py export=outputs/RUN/export
    python eval/diagnose.py export=outputs/RUN/export prompts=FILE.jsonl training=outputs/data/answers-0123456789ab

Lets the target answer the prompts, and asks for each possible cause in turn: another target or template, an engine that
computes something else than training did, rows shifted by one, other captured layers, RoPE or norms, a wrong or too
small draft vocabulary, outputs that are not fed back well, training text that is not the target's, prompts unlike those
of the training, a law of another temperature. Prints all, and the first cause found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError

if TYPE_CHECKING:
    from engine.settings import DecodeSettings
    from eval.causes import Case, Finding
    from eval.drafted_rows import Text
    from models.target import Target

_TRAINING_TEXTS = 24


def job(config: DictConfig) -> None:
    """Load, look, print and write."""
    options = plain(config)
    for key in ("num_prompts", "max_new_tokens"):
        if not isinstance(options[key], int) or options[key] < 1:
            raise UserError(f"{key} is {options[key]!r}: it must be a whole number of at least 1.")
    from models.checkpoint import detect, target_options

    folder = Path(options["export"])
    module = detect(folder, options["format"])
    export = module.read(folder)
    from data.progress import Progress
    from engine.loop import check_prompts, check_settings
    from engine.settings import DecodeSettings
    from eval.causes import Case, find
    from eval.drafted_rows import Rows
    from eval.prompt_sets import prompt_set
    from eval.provenance import provenance
    from models.files import write_json
    from models.target import load_target

    output = Path(options["output"] or folder.parent / "diagnosis.json")
    manifest = export.provenance.get("data")
    training = _training_folder(options["training"], export.provenance, folder)
    target = load_target(**target_options(export, options["target"], folder))
    drafter = module.load(folder, target)
    trained = (export.provenance.get("config") or {}).get("drafter") or {}
    check_learnt(drafter, export.provenance)
    steps = options["num_speculative_tokens"] or export.num_speculative_tokens
    settings = DecodeSettings(options["max_new_tokens"], steps)
    check_settings(target, drafter, settings)
    prompts = prompt_set(options["prompts"], target, options["num_prompts"], options["seed"])
    contexts = _contexts(target, prompts)
    check_prompts(target, contexts)
    rows = Rows(target, drafter, answers(target, contexts, settings), steps)
    case = Case(
        target, drafter, rows, None, manifest, "adapted" in export.target, settings, float(options["temperature"]),
        learning=trained.get("training") or {},
    )  # fmt: skip
    if training is not None:
        case = with_training(case, training)
    known = case.training
    findings: list[Finding] = []
    with Progress("checks", 13) as progress:
        for finding in find(case):
            findings.append(finding)
            progress.advance(1)
    print_findings(findings)
    found = next((f for f in findings if f.fault), None)
    print(verdict(findings, rows, known))
    told = {"config": options, "findings": [asdict(f) for f in findings], "cause": found and found.cause}
    write_json(output, {**told, "provenance": provenance()})
    print(f"wrote {output}")


def check_learnt(drafter: Any, provenance: dict[str, Any]) -> None:
    """Raises UserError for a drafter that learnt no laws itself, with those in it that did, and where they are from."""
    if hasattr(drafter, "unroll"):
        return
    name = type(drafter).__name__
    inner = [f"{type(part).__name__} ({at})" for at, part in drafter.named_modules() if hasattr(part, "unroll")]
    if not inner:
        raise UserError(
            f"{name} was not trained on laws: what it proposes is in the text or it is not. See its acceptance by "
            "category (eval/acceptance.py)."
        )
    model = ((provenance.get("config") or {}).get("drafter") or {}).get("model") or {}
    folders = [str(folder) for key, folder in model.items() if folder and (key == "export" or key.endswith("_export"))]
    raise UserError(
        f"{name} was not trained on laws itself, but holds what was: {', '.join(inner)}. Diagnose the export of that: "
        + (" or ".join(f"export={folder}" for folder in folders) or "export=FOLDER of a run that trained it by itself")
        + "."
    )


def _contexts(target: Target, prompts: list[Any]) -> list[list[int]]:
    from data.answers import context_ids

    return [context_ids(target, prompt) for prompt in prompts]


def answers(target: Target, contexts: list[list[int]], settings: DecodeSettings) -> list[Text]:
    """The target's own greedy answers. Raises UserError where none is long enough to look at."""
    from engine.loop import generate
    from eval.drafted_rows import Text

    made = generate(target, contexts, settings).token_ids
    texts = [Text(c + a, len(c)) for c, a in zip(contexts, made, strict=True)]
    steps = settings.num_speculative_tokens
    if not (long := [text for text in texts if len(text.token_ids) - 1 - steps > max(0, text.start - 2)]):
        raise UserError(
            f"The target answers none of these prompts with more than {steps} tokens: choose others, or a larger "
            "max_new_tokens."
        )
    return long


def _training_folder(given: str | None, provenance: dict[str, Any], export: Path) -> Path | None:
    """Where the training answers are; None where they are not found. Raises UserError where they were named wrongly."""
    if given is not None:
        if not (Path(given) / "dataset").exists():
            raise UserError(f"training={given} holds no answers: name a folder answers-… of a run's data.")
        return Path(given)
    from data.answers import fingerprint

    if (manifest := provenance.get("data")) is None:
        return None
    name = f"answers-{fingerprint(manifest)}"
    told = provenance.get("config", {}).get("data", {}).get("folder") or "."
    places = [Path(told), export.resolve().parent.parent / "data"]
    return next((place / name for place in places if (place / name / "dataset").exists()), None)


def with_training(case: Case, folder: Path) -> Case:
    """The case with the training answers in `folder`, and how they were made; or why they cannot be looked at."""
    from eval.drafted_rows import Rows

    steps = case.rows.num_steps
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else case.manifest or {}
    if not (texts := _read(folder, steps)):
        return replace(
            case,
            no_training=f"none of the answers in {folder} is long enough for a draft of {steps} tokens: "
            "num_speculative_tokens=FEWER",
        )
    known = Rows(case.target, case.drafter, texts, steps)
    return replace(case, training=known, answer_settings=manifest.get("settings", {}))


def _read(folder: Path, steps: int) -> list[Text]:
    """The first of the training answers, from where an answer begins."""
    from data.answers import open_answers
    from eval.drafted_rows import Text

    texts = []
    for row in open_answers(folder):
        mask = list(row["loss_mask"])
        start = mask.index(1) if 1 in mask else len(mask)
        end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))  # of the first answer
        if end - 1 - steps > max(0, start - 2):
            texts.append(Text(list(row["token_ids"])[:end], start))
        if len(texts) == _TRAINING_TEXTS:
            break
    return texts


def print_findings(findings: list[Finding]) -> None:
    """A line for each check."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140 if not Console().is_terminal else None)
    table = Table(title="Why is acceptance low?")
    for column in ("", "cause", "evidence"):
        table.add_column(column)
    for finding in findings:
        mark = {None: "–", False: "ok", True: "FOUND"}[finding.fault]
        table.add_row(mark, finding.cause, finding.evidence, style="bold" if finding.fault else None)
    console.print(table)


def verdict(findings: list[Finding], rows: Any, training: Any) -> str:
    """The first cause, what shows it and what to do; or that there is none."""
    found = next((f for f in findings if f.fault), None)
    if found is not None:
        return f"cause: {found.cause}\n  {found.evidence}\n  {found.remedy}"
    here = float(rows.accepted().double().mean())
    told = f"{here:.2f} of {rows.num_steps} drafted tokens are right"
    if training is not None:
        told += f", on its training answers {float(training.accepted().double().mean()):.2f}"
    return f"no fault found: {told}. What is left is skill: longer training, more data, or a larger drafter."


if __name__ == "__main__":
    main("diagnose", job)
