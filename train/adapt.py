"""Serve a stream of requests while the drafter learns from what verification teaches.

    python train/adapt.py export=outputs/RUN/export stream=shift
    python train/adapt.py export=outputs/RUN/export stream=REQUESTS.jsonl output=FOLDER
    python train/run.py +drafter=eagle +adaptation=replay

Writes versions of the drafter (FOLDER/current is an export), timeline.csv, timeline.png and adaptation.json, and
prints the adapted drafter beside the frozen one on the same requests. Started again, the same command goes on where it
stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from conf.compose import main, plain


def job(config: DictConfig) -> None:
    """The main job; see `adapt`."""
    adapt(plain(config))


def adapt(options: dict[str, Any]) -> dict[str, Any]:
    """Serve the stream, or what is left of it, and compare; returns the report.

    Raises UserError where another process is at work in the session's folder.
    """
    from models.files import alone_in
    from train.adaptation.setup import output_folder

    with alone_in(folder := output_folder(options)):
        return _adapt(options, folder)


def _adapt(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As `adapt`, in a folder of its own."""
    from models.files import write_json
    from train.adaptation import report, timeline
    from train.adaptation.setup import open_session
    from train.pipeline import open_logger

    opened = open_session(options)
    session, guard = opened.session, opened.session.parts.guard
    print(f"{len(opened.stream.requests)} requests of {options['stream']}, {len(session.rows)} of them served before")
    if opened.stream.left_out:
        print(f"{opened.stream.left_out} further requests of the file are left out: raise adaptation.requests for them")
    if len(opened.stream.requests) < (wait := session.parts.updates.wait):
        print(f"nothing is learnt before there are {wait} requests: serve more, or lower adaptation.updates.wait")
    logger = open_logger(options, folder)
    if hasattr(logger, "begin"):
        logger.begin(options)
    rows = session.run(lambda new: timeline.log(new, logger))
    held_out = report.compare_held_out(
        opened.target, opened.stream, opened.frozen, session.parts.serving, opened.decode
    )
    found = report.report(rows, opened.stream, held_out)
    timeline.print_report(found)
    limit = guard.settings.max_loss if guard.settings.enabled else None
    timeline.draw(rows, opened.stream.old, limit, folder / "timeline.png")
    if hasattr(logger, "log_image"):
        logger.log_image("timeline", [str(folder / "timeline.png")])
    logger.finalize("success")
    write_json(folder / "adaptation.json", report.plain(found))
    print(f"adapted drafter: {session.parts.versions.current}\ntimeline: {folder / 'timeline.csv'} and .png")
    return found


if __name__ == "__main__":
    main("adapt", job)
