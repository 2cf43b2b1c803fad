"""Run folders with made-up content, for tests of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STEPS_PER_EPOCH = 10

Records = list[dict[str, Any]]


def training_records(last: int = 30, **changed: Any) -> Records:
    """Return a record every second step; a change is a value, or a function of the step."""
    records = []
    for step in range(2, last + 1, 2):
        record = {
            "step": step,
            "epoch": step / STEPS_PER_EPOCH,
            "images_seen": 64 * step,
            "loss": 5.0 - step / 10,
            "class_loss": 2.5 - step / 20,
            "token_loss": 2.5 - step / 21,
            "lr": 1e-3 * min(1.0, step / 10),
            "images_per_second": 100.0 + step,
            "data_wait": 0.125 + step / 1000,
            "bad_samples": 0,
            "gradient_norm": 2.0 + step % 3,
        }
        made = {name: value(step) if callable(value) else value for name, value in changed.items()}
        records.append({key: value for key, value in (record | made).items() if value is not None})
    return records


def evaluation_records(epochs: int = 3, **changed: Any) -> Records:
    """Return an evaluation after each epoch."""
    return [
        {
            "step": STEPS_PER_EPOCH * epoch,
            "epoch": epoch,
            "images_seen": 640 * epoch,
            "top1": 20.25 + 15.5 * epoch,
            "top5": 80.125 + epoch,
            "loss": 2.0 - epoch / 3,
            "images": 50,
            "bad_samples": 0,
            "ema_top1": 18.5 + 17.75 * epoch,
            "ema_top5": 79.5 + epoch,
            "ema_loss": 2.1 - epoch / 3,
        }
        | {name: value(epoch) if callable(value) else value for name, value in changed.items()}
        for epoch in range(1, epochs + 1)
    ]


def write_run(
    folder: Path,
    *,
    records: Records | None = None,
    hosts: Sequence[str] = ("node1", "node1"),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    starts: Sequence[Mapping[str, Any]] = (),
    confusions: Mapping[str, Any] | None = None,
    last_line: str = "done: 30 steps; best weights in runs/a/checkpoints/best",
) -> Path:
    """Write a run folder and return it."""
    folder.mkdir(parents=True)
    records = [*training_records(), *evaluation_records()] if records is None else records
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    tables = {"model": {"model": "volo_d1", "img_size": 224}, "update": {"epochs": 3, "cooldown_epochs": 0}}
    for table, values in (settings or {}).items():
        tables[table] = {**tables.get(table, {}), **values}
    lines = []
    for table, values in tables.items():
        lines.append(f"[{json.dumps(table)}]")
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items()]
    (folder / "resolved.toml").write_text("\n".join(lines))
    environment = {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "commit": "abc123def456"}
    bindings = [f"gpu {rank}" for rank in range(len(hosts))]
    environment |= {"hosts": list(hosts), "bindings": bindings}
    environment |= {"banner": {"model": "volo_d1, 26,000,000 parameters"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "log.txt").write_text(f"{last_line}\n")
    first = {"step": 0, "hosts": list(hosts), "steps_per_epoch": STEPS_PER_EPOCH, "ranks": len(hosts)}
    ledger = [first, *({**first, **start} for start in starts)]
    (folder / "ledger.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in ledger))
    if confusions is not None:
        (folder / "confusions.json").write_text(json.dumps(confusions))
    return folder
