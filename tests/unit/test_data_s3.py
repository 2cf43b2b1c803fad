"""Shards in a store with the interface of S3, which `moto` serves here; skipped without it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.engine.shared_catalog import shared_catalog
from horovod_volo.pack import main
from horovod_volo.remote.remote_catalog import CacheSettings

boto3 = pytest.importorskip("boto3")
moto = pytest.importorskip("moto.server")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="shards")
    yield "shards"
    server.stop()
    assert threading.active_count() < 50


@pytest.mark.filterwarnings("ignore")  # of the server and the client, which are not part of this project
def test_samples_are_those_of_local_shards(bucket: str, tmp_path: Path) -> None:
    make_demo_set(tmp_path / "images", train=20, val=10, image_side=48)
    shards = tmp_path / "shards"
    assert main([str(tmp_path / "images"), str(shards), "--workers", "1", "--shard-images", "8"]) == 0
    client = boto3.client("s3")
    for file in filter(Path.is_file, shards.rglob("*")):
        client.upload_file(str(file), bucket, f"a/prefix/{file.relative_to(shards)}")
    local = build_catalog(str(shards), "train", None)
    for cache in (CacheSettings(), CacheSettings(str(tmp_path / "cache"), 1.0)):
        address = f"s3://{bucket}/a/prefix"
        with closing(shared_catalog(address, "train", None, World.single(), cache=cache)) as catalog:
            assert catalog.digest == local.digest
            assert all((catalog.read(index) == local.read(index)).all() for index in range(len(local)))
    with pytest.raises(UserError, match=r"s3://shards/elsewhere has no train/images\.catalog"):
        shared_catalog(f"s3://{bucket}/elsewhere", "train", None, World.single())
    client.put_object(Bucket=bucket, Key="a/prefix/train/train-000000.tar", Body=b"other")
    with (
        closing(shared_catalog(address, "train", None, World.single())) as catalog,
        pytest.raises(UserError, match="it was changed"),
    ):
        [catalog.read(index) for index in range(8)]
