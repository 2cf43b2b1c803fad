"""A report of made-up runs: its sections, its numbers, and what it does without."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.report.__main__ import main
from tests.unit.parsed_page import ParsedPage

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
        records.append(record | made)
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
    last_line: str = "done: 30 steps; best weights in runs/a/checkpoints/best",
) -> Path:
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
    return folder


SECTIONS = ["At a glance", "Quality on held-out images", "Training", "Speed", "Environment", "Recipe"]
RECORDS = [*training_records(), *evaluation_records()]


def page_of(*folders: Path) -> ParsedPage:
    page = folders[0].parent / "page.html"
    assert main([*map(str, folders), "--html", str(page)]) == 0
    return ParsedPage(page.read_text(encoding="utf-8"))


def test_a_page_has_every_section_and_requests_nothing(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a"))
    assert page.texts("h2") == SECTIONS
    anchors = {found.get("id") for _, found in page.elements}
    assert page.addresses
    assert all(address.startswith("#") and address[1:] in anchors for address in page.addresses)
    style, script = "".join(page.texts("style")), "".join(page.texts("script"))
    assert not re.search(r"@import|url\(|https?:", style)
    assert not re.search(r"fetch|XMLHttpRequest|import\(|https?:(?!//www\.w3\.org/2000/svg)", script)
    policies = [found["content"] for tag, found in page.elements if "http-equiv" in found and tag == "meta"]
    assert [policy.split(";")[0] for policy in policies] == ["default-src 'none'"]


def test_the_values_are_those_of_the_metrics(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a"))
    for key, caption, number, written in (
        ("top1", "Top-1 accuracy against epochs", 1, "{:.2f} %"),
        ("ema_top1", "Top-1 accuracy against epochs", 2, "{:.2f} %"),
        ("ema_loss", "Loss on held-out images against epochs", 2, "{:#.4g}"),
    ):
        values = {f"{record['epoch']:g}": written.format(record[key]) for record in RECORDS if key in record}
        assert page.column(caption, number) == values
    training = [record for record in RECORDS if "lr" in record]
    for key, caption, number in (
        ("loss", "Loss against epochs", 1),
        ("token_loss", "Token loss against epochs", 1),
        ("gradient_norm", "Norm of the gradient against epochs", 1),
    ):
        found = {epoch: float(value) for epoch, value in page.column(caption, number).items()}
        assert found == {f"{each['epoch']:g}": pytest.approx(each[key], rel=1e-3) for each in training}
    assert page.column("Waiting for data against epochs")["3"] == "15.50 %"
    facts = page.texts("dd")
    assert "Top-1 accuracy 71.75 % (averaged weights) after epoch 3" in facts
    assert {"117 images/s, 58 a rank", "volo_d1, 26,000,000 parameters", "3 of 3", "finished"} <= set(facts)


def test_shares_of_time_are_those_of_wall_time_with_checkpoints_between_epochs(tmp_path: Path) -> None:
    """Ten log points of 10 s of training each; before three of them, a checkpoint of 10, 20 and 40 s."""
    saved = {4: 10.0, 10: 20.0, 20: 40.0}
    made = {
        "hours": lambda step: step / 4,
        "host_memory_gib": lambda step: 10 + step / 2,
        "images_per_second": 12.8,
        "data_wait": 0.1,
        "time_data": lambda step: round(1 / (10 + saved.get(step, 0)), 6),
        "time_compute": lambda step: round(9 / (10 + saved.get(step, 0)), 6),
        "time_checkpoint": lambda step: round(saved.get(step, 0) / (10 + saved.get(step, 0)), 6),
    }
    evaluations = evaluation_records(hours=lambda epoch: 2.5 * epoch)
    page = page_of(write_run(tmp_path / "a", records=[*training_records(20, **made), *evaluations]))
    accuracy = {"2.5": "35.75 %", "5": "51.25 %", "7.5": "66.75 %"}
    assert page.column("Top-1 accuracy against hours") == accuracy
    assert page.column("Memory of the host against epochs")["2"] == "20 GiB"
    assert "5.0 h" in page.texts("dd")
    wall = 100 + 70
    assert [text for text in page.texts("li") if text.endswith("%")][-3:] == [
        f"computing {100 * 90 / wall:.1f} %",
        f"waiting for data {100 * 10 / wall:.1f} %",
        f"checkpoints {100 * 70 / wall:.1f} %",
    ]
    assert "10.00 %" in page.texts("dd")  # waiting for data, of the seconds of training


def test_several_runs_are_beside_each_other(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "run", settings={"update": {"weight_decay": 0.1}, "run": {"seed": 1}})
    second = write_run(
        tmp_path / "b" / "run",
        records=[*training_records(20, class_loss=1.5), *evaluation_records(2)],
        settings={"update": {"weight_decay": 0.2}, "run": {"seed": 1}},
    )
    page = page_of(first, second)
    assert page.texts("h1") == ["2 runs: a/run, b/run"]
    assert page.tables["What differs between the runs"] == [["update.weight_decay", "0.05", "0.1", "0.2"]]
    alike = page.tables["What differs from the defaults, alike in all runs"]
    assert ["run.seed", "42", "1", "1"] in alike
    assert ["Epochs", "3 of 3", "2 of 3"] in page.tables["The runs beside each other"]
    # Each run's raw weights, then its averaged ones; the second run is shorter.
    rows = page.tables["Top-1 accuracy against epochs"]
    assert rows[1] == ["2", "51.25 %", "54.00 %", "51.25 %", "54.00 %"]
    assert rows[2] == ["3", "66.75 %", "71.75 %", "", ""]
    assert {"Class loss", "Token loss"} <= set(page.texts("figcaption"))


def test_names_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&"
    wrong = {"index": 0, "name": f"{evil}/a.jpg", "location": evil, "taken_for": evil, "probability": 0.5}
    row = {"name": evil, "images": 4, "right": 1, "mistaken_for": evil, "mistaken": 3, "wrong": [wrong]}
    folder = write_run(
        tmp_path / "<script>alert(2)<!--",
        hosts=(evil,),
        settings={"data": {"data_dir": evil}, evil: {"key": evil}},
        records=[{**record, evil: record["step"]} for record in RECORDS],
    )
    confusions = {"step": 30, "top1": 1.0, "images": 4, "classes": 2, "image_list": "x", "worst": [row]}
    (folder / "confusions.json").write_text(json.dumps(confusions))
    page = page_of(folder)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert page.texts("h3") == [evil]
    assert "Worst classes" in page.texts("h2")
    assert not any(name.startswith("on") for _, found in page.elements for name in found)
    assert page.text.count("alert(1)") > 10


def test_a_resumed_run_whose_last_line_was_written_in_part(tmp_path: Path) -> None:
    update = {"warmup_epochs": 5, "warmup_prefix": True}
    starts, last_line = [{"step": 12}], "stopped at step 30 and saved; resume"
    folder = write_run(tmp_path / "a", starts=starts, last_line=last_line, settings={"update": update})
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 30, "epo')
    assert {"stopped and saved, resumed at step 12", "3 of 8"} <= set(page_of(folder).texts("dd"))


def test_an_elastic_run_has_a_speed_for_each_number_of_ranks(tmp_path: Path) -> None:
    """One that lost a host and got it back: the speed at a glance is that of its last ranks."""
    speeds = {"images_per_second": lambda step: 100.0 if 10 < step <= 20 else 190.0}
    four, two = ["n1", "n1", "n2", "n2"], ["n1", "n1"]
    starts = [{"step": 10, "hosts": two}, {"step": 20, "hosts": four}]
    page = page_of(write_run(tmp_path / "run", hosts=four, records=training_records(**speeds), starts=starts))
    (caption,) = [name for name in page.tables if "efficiency" in name]
    assert page.tables[caption] == [
        ["run", "2", "1", "100", "50.0", "100.0 %"],
        ["run", "4", "2", "190", "47.5", "95.0 %"],
    ]
    assert {"190 images/s, 48 a rank", "4 ranks on 2 hosts"} <= set(page.texts("dd"))


@pytest.mark.parametrize(
    ("metrics", "best"),
    [
        ({"miou": 40.5, "pixel_accuracy": 80.25, "class_accuracy": 50.0}, "Mean IoU 40.50 %"),
        ({"ap": 20.5, "ap50": 41.25, "ap_small": 3.5, "ar100": 30.0}, "AP 20.50 %"),
    ],
)
def test_the_metrics_of_other_tasks_are_shown(tmp_path: Path, metrics: dict[str, float], best: str) -> None:
    records = [{"step": 10, "epoch": 1, **metrics, "images": 9, "bad_samples": 0}]
    page = page_of(write_run(tmp_path / "a", records=[*training_records(), *records]))
    assert f"{best} after epoch 1" in page.texts("dd")
    constant = "\n".join(page.texts("p"))
    for value in metrics.values():
        assert f": {value:.2f} %." in constant
    assert "Damaged images left out: 0." in constant


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", "[1]\nnull\n{'step'\n", "metrics.jsonl has no record. Wait"),
        ("resolved.toml", None, "resolved.toml"),
        ("resolved.toml", '[model]\nmodel = "volo', "resolved.toml is damaged"),
        ("environment.json", '{"hosts": [', "environment.json is damaged"),
        ("confusions.json", "{", "confusions.json is damaged"),
    ],
)
def test_a_damaged_folder_is_one_error(tmp_path, name, content, message, capsys):
    folder = write_run(tmp_path / "a")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert message in mistake(capsys, str(folder))
    assert not (folder / "report.html").exists()
    assert "named twice" in mistake(capsys, str(folder), str(folder))
    other, page = write_run(tmp_path / "b"), tmp_path / "no" / "page"
    assert "--html" in mistake(capsys, str(other), "--html", str(page))


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line of a command that is refused."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_runs_of_other_versions_have_a_page(tmp_path: Path) -> None:
    """One with settings and values that this version does not know, and without the other files."""
    settings: dict[str, Any] = {"model": {"kernels": "gone"}, "update": {"gone": 1}}
    folder = write_run(tmp_path / "a", settings=settings)
    for name in ("environment.json", "log.txt", "ledger.jsonl"):
        (folder / name).unlink()
    page = page_of(folder)
    assert page.column("Top-1 accuracy against epochs")["2"] == "51.25 %"
    assert "volo_d1, 224 px" in page.texts("dd")
    rows = page.tables["What differs from the defaults"]
    assert ["update.gone", "not a setting of this version", "1"] in rows
    assert "Environment" not in page.texts("h2")
