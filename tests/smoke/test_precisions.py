"""bf16 and fp16 train on the CPU too, with losses close to those of fp32."""

import json

import pytest

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import train


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=40, val=20)
    return folder


@pytest.fixture(scope="module")
def fp32_losses(images, tmp_path_factory):
    return losses(images, tmp_path_factory.mktemp("fp32"), "fp32")


def losses(images, output, precision):
    done = train(
        *(str(images), "--recipe", "demo", "--img-size", "32", "--batch-size", "8", "--log-every", "1"),
        *("--precision", precision, "--stop-at-step", "4", "--output", str(output), "--name", "run"),
        *("--accumulation", "2", "--clip-grad", "1.0", "--lr", "1e-3", "--warmup-epochs", "0"),
        ranks=1,
        start_with="none",
    )
    assert done.returncode == 75, done.stdout
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "lr" in record]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_in_bf16_and_fp16_are_close_to_fp32(images, tmp_path, fp32_losses, precision):
    found = losses(images, tmp_path, precision)
    assert len(found) == 4
    assert found == pytest.approx(fp32_losses, rel=2e-2)
    assert found != fp32_losses, "the losses are those of fp32: the precision was not used"
