"""Where a round's time goes, and how fast the engine is beside transformers' `generate`.

    python eval/speed.py target.source=smollm2 export=[outputs/A/export,outputs/B/export]
    python eval/speed.py export=outputs/A/export lengths=[1,2,3,4,5,6,7,8]      # and what theory predicts for each

All ways answer each prompt in turns, greedily. Prints tables, and writes speed.json with provenance.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError

if TYPE_CHECKING:
    from engine.settings import DecodeSettings
    from engine.stats import DecodingStats
    from models.target import Target

_RESAMPLES = 2000
Answer = Callable[[list[int]], "Timed"]


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer and where its time went; ways that are not ours only know the total."""

    token_ids: list[int]
    total_s: float
    prefill_s: float = float("nan")
    draft_s: float = float("nan")
    verify_s: float = float("nan")
    rounds: float = float("nan")
    stats: DecodingStats | None = None

    @property
    def drafted_tokens(self) -> float:
        """How many tokens were drafted."""
        return float("nan") if self.stats is None else float(self.stats.drafted.sum())


@dataclass(slots=True)
class Way:
    """A way to answer. `baseline` names the way of transformers that does the same, `longest` that of longer chains."""

    name: str
    answer: Answer
    baseline: str | None = None
    answers: list[Timed] = field(default_factory=list)
    longest: str | None = None

    def total(self, what: str) -> float:
        """The sum of a time, in seconds, or of rounds over all answers."""
        return float(sum(getattr(a, what) for a in self.answers))


def job(config: DictConfig) -> None:
    """Load everything, time all ways in turns, print and write."""
    options = plain(config)
    from data.answers import context_ids
    from data.progress import Progress
    from eval import adapted
    from eval.prompt_sets import prompt_set
    from eval.provenance import provenance
    from eval.table import unique_names
    from models.checkpoint import native
    from models.files import write_json
    from models.target import load_target

    folders = [Path(f) for f in (options["export"] if isinstance(options["export"], list) else [options["export"]])]
    exports = [native.read(folder) for folder in folders]
    load = exports[0].target["load"] if exports else {"source": "tiny"}
    wanted = {**load, **{k: v for k, v in options["target"].items() if v is not None}}
    output = Path(options["output"] or f"outputs/speed-{wanted['source']}")
    write_json(output / "config.json", options)  # before the long work: can it be written?
    target, theirs = load_target(**wanted), load_target(**wanted)  # the second as transformers would run it
    target.accelerate()
    settings = _settings({**options, "decode": {**options["decode"], "tree": None}}, 1)
    if settings.sampling.adjusts or settings.stop_strings or settings.max_new_tokens < 2:
        raise UserError("Speed is compared without penalty, bias and stop strings, on answers of 2 tokens or more.")
    ways = [
        Way("plain", our_engine(target, None, settings), baseline="transformers"),
        Way("transformers", _transformers(theirs, settings.max_new_tokens, {})),
    ]
    for name, folder, export in zip(unique_names(folders, [e.name for e in exports]), folders, exports, strict=True):
        ways += _ways_of_export(options, name, folder, export, target, theirs)
    prompts = prompt_set(options["prompts"], target, options["num_prompts"], options["seed"])
    with Progress("timing", len(prompts)) as progress:
        for index, prompt in enumerate(prompts):
            in_turns(ways, context_ids(target, prompt), options["repeats"], index)
            progress.advance(1)
    report = {"config": options, "ways": summaries(ways), "passes": passes(target), "provenance": provenance()}
    print_report(report)
    for said in filter(None, (adapted.report(export.target) for export in exports)):
        print(said)
    write_json(output / "speed.json", report)
    print(f"wrote {output / 'speed.json'}")


def _settings(options: dict[str, Any], num_tokens: int, tree: dict[str, Any] | None = None) -> DecodeSettings:
    from engine.options import decode_settings

    return decode_settings(options["decode"], 0.0, options["seed"], num_tokens, tree)


def _ways_of_export(
    options: dict[str, Any], name: str, folder: Path, export: Any, target: Target, theirs: Target
) -> list[Way]:
    """The export in our engine and, where transformers can run the same drafter, in its `generate`."""
    from engine.loop import check_settings
    from models.checkpoint import native
    from models.drafter import accelerate_drafter

    drafter = native.load(folder, target)
    settings = _settings(options, export.num_speculative_tokens, export.tree)
    check_settings(target, drafter, settings)
    if (lengths := options["lengths"]) is not None:
        if settings.tree is not None or not isinstance(lengths, list) or not lengths:
            raise UserError(f"lengths is {lengths!r}: give lengths of chains, as [1,2,4,8], and leave decode.tree out.")
        accelerate_drafter(drafter)
        chains = [replace(settings, num_speculative_tokens=length) for length in lengths]
        names = [f"{name}, {length} tokens" for length in lengths]
        last = names[lengths.index(max(lengths))]
        return [Way(n, our_engine(target, drafter, c), longest=last) for n, c in zip(names, chains, strict=True)]
    found = []
    if hasattr(drafter, "transformers_options"):
        same = native.load(folder, theirs).transformers_options(settings.num_speculative_tokens)
        found.append(Way(f"transformers, {name}", _transformers(theirs, settings.max_new_tokens, same)))
    accelerate_drafter(drafter)
    ours = Way(name, our_engine(target, drafter, settings), baseline=found[0].name if found else None)
    return [ours, *found]


def our_engine(target: Target, drafter: Any, settings: DecodeSettings) -> Answer:
    """Our engine, plain or with a drafter, one request at a time."""
    from engine.loop import generate

    def answer(context: list[int]) -> Timed:
        made = generate(target, [context], settings, drafter)
        s = made.seconds
        rounds = float(made.stats.rounds.sum())
        return Timed(made.token_ids[0], s.total, s.prefill, s.draft, s.verify, rounds, made.stats)

    return answer


def _transformers(target: Target, max_new_tokens: int, options: dict[str, Any]) -> Answer:
    """Greedy `generate`, plain or with the drafter that `options` hand it."""
    import torch

    def answer(context: list[int]) -> Timed:
        ids = torch.tensor([context], device=target.device)
        stop = sorted(target.stop_token_ids)
        started = time.perf_counter()
        with torch.inference_mode():
            out = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=stop or None,
                pad_token_id=stop[0] if stop else 0,
                **options,
            )
        return Timed(out[0, len(context) :].tolist(), time.perf_counter() - started)

    return answer


def in_turns(ways: list[Way], context: list[int], repeats: int, index: int) -> None:
    """Let every way answer, each time in another order; of each way the fastest answer is kept."""
    best: dict[int, Timed] = {}
    for repeat in range(repeats):
        first = (index + repeat) % len(ways)
        for number in [*range(first, len(ways)), *range(first)]:
            made = ways[number].answer(context)
            if number not in best or made.total_s < best[number].total_s:
                best[number] = made
    for number, way in enumerate(ways):
        way.answers.append(best[number])


def summaries(ways: list[Way]) -> list[dict[str, Any]]:
    """Speed, ratios with 95% bootstrap intervals over prompts, and the parts of a round, of every way."""
    plain_way, by_name = ways[0], {way.name: way for way in ways}
    plain_token_s = plain_way.total("verify_s") / max(1.0, plain_way.total("rounds"))
    result = []
    for way in ways:
        tokens, rounds = sum(len(a.token_ids) for a in way.answers), way.total("rounds")
        same = [a.token_ids == b.token_ids for a, b in zip(way.answers, plain_way.answers, strict=True)]
        row: dict[str, Any] = {
            "name": way.name,
            "tokens_per_s": tokens / way.total("total_s"),
            "identical_to_plain": sum(same),
            "prompts": len(same),
            "speedup_over_plain": ratio(way, plain_way),
        }
        if way.baseline is not None:
            row |= {"baseline": way.baseline, "speedup_over_baseline": ratio(way, by_name[way.baseline])}
        if rounds > 0:  # ours: of others it is not known
            draft, verify = way.total("draft_s") / rounds, way.total("verify_s") / rounds
            whole = (way.total("total_s") - way.total("prefill_s")) / rounds
            efficiency = (tokens - len(way.answers)) / rounds
            row |= {
                "block_efficiency": efficiency,
                "draft_ms": 1e3 * draft,
                "verify_ms": 1e3 * verify,
                "other_ms": 1e3 * (whole - draft - verify),
                "other_share": (whole - draft - verify) / whole,
                "bound": efficiency * plain_token_s / (draft + verify),  # τ·t_plain / (t_verify + t_draft)
                "bound_reached": (draft + verify) / whole,
            }
            row |= _predicted(way, plain_way, by_name[way.longest or way.name])
        result.append(row)
    return result


def _predicted(way: Way, plain_way: Way, longest: Way) -> dict[str, Any]:
    """The speed-up over plain that theory predicts; nothing for a way that drafts nothing.

    Of a chain's own run only the seconds of a check are taken; acceptance, and the seconds of a drafted token and of
    the rest of a round, are those of the `longest` chain.
    """
    from eval.measure import predicted_speedup

    stats, source = _pooled(way), _pooled(longest)
    if stats is None or source is None:
        return {}
    rounds, other_rounds = stats.rounds.sum(), source.rounds.sum()
    tokens, plain_tokens = (sum(len(a.token_ids) for a in w.answers) for w in (way, plain_way))
    prefill_s, verify_s = way.total("prefill_s"), way.total("verify_s")
    draft_s = longest.total("draft_s") / source.drafted.sum() * stats.drafted.sum()
    parts = sum(longest.total(name) for name in ("prefill_s", "draft_s", "verify_s"))
    rest_s = (longest.total("total_s") - parts) / other_rounds * rounds
    predicted = predicted_speedup(
        stats,
        plain_s_per_token=plain_way.total("total_s") / plain_tokens,
        tokens=tokens,
        total_s=prefill_s + draft_s + verify_s + rest_s,
        prefill_s=prefill_s,
        draft_s=draft_s,
        verify_s=verify_s,
        acceptance=source.conditional_acceptance[: stats.drafts.shape[1]],
    )
    return {"conditional_acceptance": stats.conditional_acceptance, "predicted_speedup": predicted}


def _pooled(way: Way) -> DecodingStats | None:
    """The counters of all answers of a way of ours that drafts chains."""
    from engine.stats import DecodingStats

    parts = [a.stats for a in way.answers if a.stats is not None]
    stats = DecodingStats.concatenate(parts) if parts else None
    return stats if stats is not None and (stats.drafted == stats.drafts).all() and stats.drafts.any() else None


def ratio(way: Way, baseline: Way) -> tuple[float, float, float]:
    """Seconds per token of `baseline` over those of `way`, and the 95% bootstrap interval over prompts."""
    ours, theirs = (
        np.array([[a.total_s, len(a.token_ids)] for a in w.answers]) for w in (way, baseline)
    )  # (P, 2): seconds, tokens

    def of(rows: Any) -> float:
        (s, n), (base_s, base_n) = ours[rows].sum(0), theirs[rows].sum(0)
        return float((base_s / base_n) / (s / n))

    rng = np.random.default_rng(0)
    resampled = [of(rng.integers(len(ours), size=len(ours))) for _ in range(_RESAMPLES)]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return of(slice(None)), float(low), float(high)


def passes(target: Target, context: int = 128, repeats: int = 15) -> dict[str, Any]:
    """Least and median ms of a pass over a few new rows behind `context`, beside the time that reading weights takes.

    The bound is the weights' bytes over the bandwidth at which the same machine sums a large tensor.
    """
    import torch

    with torch.inference_mode():
        context = min(context, target.max_positions // 2)
        cache = target.new_cache(1, context + 16)
        target.step(torch.randint(target.vocab_size, (1, context), device=target.device), cache)
        cache.commit(torch.tensor([context]))
        rows_of = {
            rows: torch.randint(target.vocab_size, (1, rows), device=target.device) for rows in (1, 2, 3, 5, 8, 16)
        }
        times: dict[int, list[float]] = {rows: [] for rows in rows_of}
        for _ in range(repeats):
            for rows, ids in rows_of.items():
                started = time.perf_counter()
                target.head(target.step(ids, cache).last)[0, 0, 0].item()
                times[rows].append(1e3 * (time.perf_counter() - started))
        big = torch.ones(2**26, device=target.device)
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            big.sum().item()
            seconds.append(time.perf_counter() - started)
    embedding: Any = target.embedding.weight
    read = {p.data_ptr(): p.nbytes for p in target.model.parameters() if p.data_ptr() != embedding.data_ptr()}
    read[target.head.weight.data_ptr()] = target.head.weight.nbytes
    num_bytes, bandwidth = sum(read.values()), 4 * 2**26 / min(seconds)
    return {
        "context": context,
        "least_ms": {rows: min(found) for rows, found in times.items()},
        "median_ms": {rows: float(np.median(found)) for rows, found in times.items()},
        "weights_mb": num_bytes / 1e6,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "bound_ms": 1e3 * num_bytes / bandwidth,
    }


def print_report(report: dict[str, Any]) -> None:
    """The ways, the parts of a round, and the passes, as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=132 if not Console().is_terminal else None)
    speeds, parts = Table(title="Speed, greedy, one request at a time"), Table(title="A round's time")
    for column in ("", "tokens/s", "over our plain", "predicted", "over transformers", "identical to plain"):
        speeds.add_column(column, justify="right" if column else "left")
    for column in ("", "τ", "draft ms", "verify ms", "other ms", "other", "bound", "reached"):
        parts.add_column(column, justify="right" if column else "left")
    for row in report["ways"]:
        over = interval(row["speedup_over_baseline"]) if "baseline" in row else ""
        identical = f"{row['identical_to_plain']} of {row['prompts']}"
        predicted = f"{row['predicted_speedup']:.2f}" if "predicted_speedup" in row else ""
        plainly = interval(row["speedup_over_plain"])
        speeds.add_row(row["name"], f"{row['tokens_per_s']:.1f}", plainly, predicted, over, identical)
        if "draft_ms" in row:
            numbers = [f"{row[key]:.2f}" for key in ("block_efficiency", "draft_ms", "verify_ms", "other_ms")]
            parts.add_row(
                row["name"], *numbers, f"{row['other_share']:.1%}", f"{row['bound']:.2f}", f"{row['bound_reached']:.0%}"
            )
    console.print(speeds)
    console.print(parts)
    console.print(
        "predicted: the speed-up over plain by theory, from acceptance by position, from what a drafted token and the "
        "rest of a round took in the longest chains, and from what a check took.\n"
        "bound: τ · t_plain / (t_verify + t_draft), the speed-up if nothing else took time. On a GPU the part of a "
        "draft that is still being computed when the target's pass is asked for counts as verification.",
        style="dim",
    )
    found, table = report["passes"], Table(title=f"A target pass behind {report['passes']['context']} tokens, ms")
    for column in ("new rows", *map(str, found["least_ms"])):
        table.add_column(column, justify="right")
    for kind in ("least", "median"):
        table.add_row(kind, *(f"{ms:.1f}" for ms in found[f"{kind}_ms"].values()))
    console.print(table)
    console.print(
        f"reading {found['weights_mb']:.0f} MB of weights at {found['bandwidth_gb_per_s']:.1f} GB/s, as measured here, "
        f"takes {found['bound_ms']:.1f} ms",
        style="dim",
    )


def interval(values: tuple[float, float, float]) -> str:
    """A ratio and its interval, for a table."""
    return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"


if __name__ == "__main__":
    main("speed", job)
