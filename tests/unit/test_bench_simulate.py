"""`bench simulate` from its command line to its charts, and the check against recorded measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from horovod_volo.bench import __main__ as command_line
from horovod_volo.bench.results import Record
from horovod_volo.bench.scaling_study import simulate
from horovod_volo.bench.scaling_study.network import Fabric, parameter_server_seconds, ring_seconds
from horovod_volo.bench.scaling_study.prediction import measured_gradient_times
from horovod_volo.bench.scaling_study.validation import checked, published_points
from horovod_volo.core.errors import UserError

LINKS = Fabric("links", 1, 0.002, 0.001, 0.001, 0.001, 0.001, 12e6, 12e6)
SVG = "{http://www.w3.org/2000/svg}"


def recorded(*, slower: float = 1.0) -> Record:
    """Make a record of `bench scaling` of which 4 hosts took `slower` times what the model says."""
    figures = []
    for hosts in (2, 3, 4):
        factor = 1e3 * (slower if hosts == 4 else 1.0)
        for mib in (4, 8):
            size = mib * 2**20
            label = f"{hosts} hosts of 100 Mbit/s, {mib} MiB"
            times = {
                "ring": ring_seconds(size, hosts, LINKS),
                "server": parameter_server_seconds(size, hosts, LINKS),
            }
            figures += [{"label": f"{label}: {method}", "value": factor * times[method]} for method in times]
            figures.append({"label": f"{label}: ring faster", "value": times["server"] / times["ring"]})
    return {"name": "scaling", "figures": figures}


def test_what_the_model_made_is_predicted_exactly() -> None:
    found = checked(recorded())
    assert {(point.ranks, point.what) for point in found} == {
        (hosts, f"{mib} MiB, {method}")
        for mib in (4, 8)
        for hosts, method in ((4, "ring"), (2, "server"), (3, "server"), (4, "server"))
    }
    assert [point.error for point in found] == pytest.approx([0.0] * len(found), abs=1e-6)


def test_an_error_is_seen_and_never_calibrated_away() -> None:
    errors = [point.error for point in checked(recorded(slower=1.25)) if point.ranks == 4]
    assert errors == pytest.approx([-0.2] * len(errors), abs=1e-6)


def test_a_record_without_hosts_checks_nothing() -> None:
    processes = {"label": "2 processes, 8 MiB: ring", "value": 3.0}
    assert checked({"name": "scaling", "figures": [processes]}) == []


def test_published_points_have_bounds_in_order() -> None:
    for point in published_points():
        assert 0 < point.low <= point.high <= 1


def test_every_gradient_is_ready_within_backward() -> None:
    workload = measured_gradient_times("volo_demo", 32, repeats=1)
    assert sum(tensor.size for tensor in workload.tensors) == 2 * workload.parameters
    assert all(0 < tensor.ready <= 1 for tensor in workload.tensors)
    ready = [bucket.ready for bucket in workload.buckets]
    assert ready == sorted(ready)
    assert ready[-1] == workload.tensors[-1].ready  # the last gradient is in the last bucket


def test_a_chart_is_svg_that_shows_every_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = {"a < b": {8: 99.0, 1024: 90.0}, "second": {8: 98.5, 1024: 90.1}}
    file = tmp_path / "new" / "chart.svg"
    simulate.draw(file, lines, "Title & more", ("ranks", "%"), (80.0, 100.0))
    drawing = ElementTree.parse(file).getroot()
    texts = [text.text for text in drawing.iter(f"{SVG}text")]
    assert {"Title & more", "ranks", "%", "a < b", "second", "8", "1,024"} <= set(texts)
    first = file.read_bytes()
    simulate.draw(file, lines, "Title & more", ("ranks", "%"), (80.0, 100.0))
    assert file.read_bytes() == first


def test_charts_without_matplotlib_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(
        simulate, "measured_gradient_times", lambda *_: pytest.fail("nothing is to be measured")
    )
    assert command_line.main(["simulate", "--figures", str(tmp_path)]) == 2
    assert "pip install 'horovod_volo[bench]'" in capsys.readouterr().err


def test_the_command_reports_efficiencies_and_draws_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(simulate, "read_records", lambda: [recorded()])
    words = ["simulate", "--models", "volo_d1", "--fabrics", "h200-ndr", "--img-size", "32"]
    words += ["--ranks", "8", "256", "--figures", str(tmp_path), "--json"]
    assert command_line.main(words) == 0
    found = {figure["label"]: figure["value"] for figure in json.loads(capsys.readouterr().out)["figures"]}
    few, many = (found[f"8 x H200, 8 x NDR400, volo_d1, {ranks} ranks: ours"] for ranks in (8, 256))
    assert 80 < many < few < 100
    assert found["largest error of the ring's predictions"] == pytest.approx(0, abs=1e-3)
    assert {file.name for file in tmp_path.iterdir()} == {"h200-ndr.svg", "exchange.svg"}
    for file in tmp_path.iterdir():
        ElementTree.parse(file)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--fabrics", "string"], "a100-hdr"),
        (["--ranks", "1"], "of at least 2"),
        (["--models", "volo_demo"], "volo_d1"),
    ],
)
def test_a_mistake_is_reported_with_its_remedy(
    words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["simulate", *words]) == 2
    assert remedy in capsys.readouterr().err


def test_a_chart_without_hosts_says_what_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(simulate, "read_records", lambda: [{"name": "scaling", "figures": []}])
    monkeypatch.setattr(
        simulate, "measured_gradient_times", lambda *_: pytest.fail("nothing is to be measured")
    )
    with pytest.raises(UserError, match="bench scaling"):
        simulate.measure(figures=str(tmp_path))
