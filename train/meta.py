"""Pre-adapt a drafter over the domains of a stream, so that a few requests of one suffice later.

    python train/meta.py export=DIR stream=shift
    python train/meta.py export=DIR stream=REQUESTS.jsonl meta.by=fomaml

Answers some requests of every domain, learns a start over them, and writes it as an export for train/adapt.py. Prints
the loss after a few steps in each domain from the old start and from the new one, on requests that neither has learnt
from.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.compose import main, plain

if TYPE_CHECKING:
    from engine.settings import DecodeSettings
    from models.target import Target
    from train.adaptation.records import Record
    from train.adaptation.regime import OnlineRegime
    from train.adaptation.sections import BufferSettings


def job(config: DictConfig) -> None:
    """The main job; see `pre_adapt_export`."""
    pre_adapt_export(plain(config))


def pre_adapt_export(options: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Write the meta-learned start; returns each domain's loss after the inner steps, before and after."""
    from engine.options import decode_settings
    from models.checkpoint import detect, target_options
    from models.errors import UserError
    from models.target import load_target
    from train.adaptation.learner import Learner
    from train.adaptation.meta import MetaSettings, adapted_loss, pre_adapt
    from train.adaptation.sections import read, sections_of
    from train.adaptation.successors import output_of, save

    given, source = options["adaptation"], Path(options["export"]).expanduser()
    settings, sections = read(MetaSettings, options["meta"], "meta"), sections_of(given)
    if given["lora"] is not None:
        raise UserError("adaptation.lora is for train/adapt.py: a start is learnt in all weights, so leave it null.")
    output = output_of(options["output"] or source.parent / f"meta-{settings.by}", source, "meta")
    module = detect(source)
    described = module.read(source.resolve())
    target = load_target(**target_options(described, options["target"], source))
    tokens, tree, seed = described.num_speculative_tokens, described.tree, options["seed"]
    decode = decode_settings(options["decode"], float(given["temperature"]), seed, tokens, tree)
    learner = Learner(
        module.load(source, target), target, sections.updates, sections.loss, sections.optimizer, None,
        depth=decode.depth, seed=seed,
    )  # fmt: skip
    known, held = collect(options, sections.buffer, target, module.load(source, target), decode)
    parameters = [p for p in learner.drafter.parameters() if p.requires_grad]

    def compared() -> dict[str, float]:
        batches = Batches(learner.regime, held, options["batch"])
        return {domain: adapted_loss(parameters, batches, domain, settings, 0) for domain in held}

    before = compared()
    pre_adapt(parameters, Batches(learner.regime, known, options["batch"]), sorted(known), settings)
    after = compared()
    note = f"A start learnt by train/meta.py ({settings.by}) from {described.name!r}, over {', '.join(sorted(known))}."
    told = {"meta": options["meta"], "domains": sorted(known), "requests": options["requests"]}
    save(learner.drafter, described, source, output, "meta", note, told)
    for domain in before:
        print(
            f"{domain}: loss after {settings.inner_steps} steps {before[domain]:.3f} from the old start, "
            f"{after[domain]:.3f} from the new"
        )
    print(f"start: {output}")
    return {domain: (before[domain], after[domain]) for domain in before}


def collect(
    options: dict[str, Any], buffer: BufferSettings, target: Target, drafter: Any, decode: DecodeSettings
) -> tuple[dict[str, list[Record]], dict[str, list[Record]]]:
    """Records of every domain that is not kept out: those to learn from, and as many as a comparison takes."""
    from data.streams import open_stream
    from models.errors import UserError
    from train.adaptation.meta import check_domains

    given, batch, wanted = options["adaptation"], options["batch"], options["requests"]
    if batch < 1 or wanted < batch:
        raise UserError(f"requests is {wanted} and batch {batch}: give a batch of at least 1, and requests for one.")
    held = batch * (options["meta"]["inner_steps"] + 1)  # one batch to each inner step, and one to compare on
    stream = open_stream(options["stream"], target, given["requests"], given["guard"]["num_prompts"], options["seed"])
    buffer.check(stream)
    asked: dict[str, list[list[int]]] = {}
    for request in stream.requests:
        if request.domain not in buffer.keep_out:
            asked.setdefault(request.domain, []).append(request.token_ids)
    check_domains({domain: len(prompts) for domain, prompts in asked.items()}, held + batch)
    found = {
        d: served(target, drafter, prompts[: wanted + held], decode, d, buffer.law_tokens)
        for d, prompts in asked.items()
    }
    check_domains({domain: len(records) for domain, records in found.items()}, held + batch)
    return {d: r[:-held] for d, r in found.items()}, {d: r[-held:] for d, r in found.items()}


def served(
    target: Target, drafter: Any, prompts: list[list[int]], decode: DecodeSettings, domain: str, law_tokens: int
) -> list[Record]:
    """Records of these prompts, answered by a drafter that does not change; those without a draft teach nothing."""
    from engine.loop import generate
    from train.adaptation.records import Recorder

    recorder = Recorder(prompts, law_tokens)
    made = generate(target, prompts, decode, drafter, observer=recorder)
    found = [recorder.record(i, answer, request=i, domain=domain, about={}) for i, answer in enumerate(made.token_ids)]
    return [record for record in found if len(record.place)]


class Batches:
    """The loss of batch after batch of each domain's records, in turn."""

    def __init__(self, regime: OnlineRegime, records: dict[str, list[Record]], size: int) -> None:
        self._regime, self._records, self._size = regime, records, size

    def __call__(self, domain: str, number: int) -> Any:
        import torch

        from train.adaptation.batches import replay_batch

        records = self._records[domain]
        chosen = [records[(number * self._size + i) % len(records)] for i in range(self._size)]
        positions = [torch.arange(len(record.place)) for record in chosen]
        return self._regime.training_losses(replay_batch(chosen, positions, self._regime.target.device), number)["loss"]


if __name__ == "__main__":
    main("meta", job)
