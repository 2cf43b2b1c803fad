"""Shards on a server give the samples of the same shards on a local disk, in the same order, or an error."""

import base64
import json
import multiprocessing
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from cache_process import BLOCK, read_all, used_bytes
from coded_images import contents, evaluated_images, train_loader
from numpy.typing import NDArray
from shard_writers import picture, write_tar

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.images.catalog_file import CatalogEntry
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.engine.classification_data import shared_catalog
from horovod_volo.pack import main
from horovod_volo.remote import remote_folder
from horovod_volo.remote.remote_catalog import RemoteCatalog
from horovod_volo.remote.remote_folder import RemoteFolder
from horovod_volo.train import main as train
from tests.range_server import FolderServer, serving

ALONE = World.single()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    make_demo_set(folder / "images", train=40, val=20, image_side=48)
    places = [str(folder / "images"), str(folder / "shards")]
    assert main([*places, "--workers", "1", "--shard-images", "16"]) == 0
    return folder / "shards"


@pytest.fixture
def server(packed: Path, tmp_path: Path) -> Iterator[FolderServer]:
    shutil.copytree(packed, tmp_path / "served")
    with serving(tmp_path / "served") as server:
        yield server


@pytest.fixture(autouse=True)
def small_blocks_and_short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "BLOCK_BYTES", BLOCK)
    pauses = {"init_backoff": timedelta(seconds=0.001), "max_backoff": timedelta(seconds=0.01), "base": 2}
    monkeypatch.setattr(remote_folder, "BACKOFF", pauses)


def remote(
    server: FolderServer, split: str = "train", cache: Path | None = None, gib: float = 1.0
) -> RemoteCatalog:
    settings = Data(cache_dir="" if cache is None else str(cache), cache_gib=gib)
    catalog = shared_catalog(server.address, split, None, ALONE, cache=settings)  # type: ignore[arg-type]
    assert isinstance(catalog, RemoteCatalog)
    return catalog


def samples(catalog: Catalog, first_step: int = 0, **settings: object) -> list[tuple[list[int], bytes]]:
    """Return the indices and the augmented pixels of an epoch's batches."""
    with closing(train_loader(catalog, Data(batch_size=4, **settings), rank=1, size=2)) as loader:  # type: ignore[arg-type]
        batches = loader.batches(1, first_step)
        return [(batch.indices.tolist(), batch.images.numpy().tobytes()) for batch in batches]


@pytest.mark.parametrize("has_cache", [False, True])
def test_samples_are_those_of_local_shards(packed, server, tmp_path, has_cache):
    local = build_catalog(str(packed), "train", None)
    expected = samples(local, block_shuffle=8)
    with closing(remote(server, cache=tmp_path / "cache" if has_cache else None)) as catalog:
        assert (catalog.digest, catalog.classes) == (local.digest, local.classes)
        assert server.bytes_of(".tar") == 0  # the list needs no shard
        assert contents(catalog) == contents(local)
        listed = len(server.requests)
        assert has_cache or len(catalog.read(5)) == sum(length for _, _, length in server.requests[listed:])
        for first_step in (0, 3):  # the second as after a restart
            assert samples(catalog, first_step, block_shuffle=8) == expected[first_step:]
        assert catalog.location(0).startswith(f"{server.address}/train/train-000000.tar, bytes ")
    assert server.connections <= 1 + 16 + 2 * 2 * 2  # they are kept open
    with closing(remote(server, "val")) as catalog:
        held_out = (catalog, build_catalog(str(packed), "val", None))
        found, wanted = (evaluated_images(images, Data(batch_size=8)) for images in held_out)
        assert found.equal(wanted)


def test_each_announced_image_is_read_once_and_none_is_kept_for_ever(server, monkeypatch):
    reads = list[tuple[int, int]]()
    read_range = RemoteCatalog._range_of_shard

    def noted(catalog: RemoteCatalog, record: CatalogEntry) -> bytes:
        reads.append((record.shard, record.offset))
        return read_range(catalog, record)

    monkeypatch.setattr(RemoteCatalog, "_range_of_shard", noted)
    with closing(remote(server)) as catalog, ThreadPoolExecutor(4) as pool:
        batches = np.arange(40).reshape(4, 10)
        for batch in batches:
            catalog.read_ahead(batch)
        for batch in batches:
            list(pool.map(catalog.read, batch.tolist()))
        assert len(reads) == len(set(reads)) == 40
        # An epoch that is left in the middle: its images are dropped when the next epoch begins.
        catalog.read_ahead(np.arange(10))
        catalog.read_ahead(np.arange(20, 30))
        catalog.read(20)
        assert [len(batch) for batch in catalog._announced] == [9]


def test_blocks_are_kept_for_the_next_process_and_read_once(server: FolderServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with closing(remote(server, cache=cache)) as catalog, ThreadPoolExecutor(8) as pool:
        numbers = [*range(40)] * 3
        first = list(pool.map(lambda number: catalog.read(number).tobytes(), numbers))
        shard_bytes = sum(path.stat().st_size for path in (server.folder / "train").glob("*.tar"))
        probes = 3  # of the version of each shard, a byte
        assert server.bytes_of(".tar") <= shard_bytes + probes
    server.requests.clear()
    with closing(remote(server, cache=cache)) as catalog:
        assert [catalog.read(number).tobytes() for number in numbers] == first
        assert server.bytes_of(".tar") == probes


def test_a_damaged_block_is_read_again(server: FolderServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with closing(remote(server, cache=cache)) as catalog:
        expected = contents(catalog)
    blocks = sorted(path for path in (cache / "blocks").rglob("*") if path.is_file())
    blocks[0].write_bytes(bytes(blocks[0].stat().st_size))
    blocks[1].write_bytes(blocks[1].read_bytes()[:100])
    blocks[2].write_bytes(b"")
    blocks[0].with_name(".0.partial").write_bytes(b"of a process that was killed")
    (cache / "usage").write_bytes(b"")
    with closing(remote(server, cache=cache)) as catalog:
        assert contents(catalog) == expected


def test_a_fault_of_the_cache_is_no_damage_of_samples(server: FolderServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with closing(remote(server, cache=cache)) as catalog:
        catalog.read(0)
        shutil.rmtree(cache)
        cache.write_bytes(b"")
        with pytest.raises(UserError, match=r"the cache in .* cannot be used: .*--cache-dir"):
            [catalog.read(number) for number in range(40)]


def test_processes_share_a_cache_below_its_limit_while_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "file").write_bytes(b"".join(bytes([n % 251]) * 1000 for n in range(100)))
    cache, limit = tmp_path / "cache", 6 * (BLOCK + 4)
    with serving(tmp_path / "served") as server:
        context = multiprocessing.get_context("spawn")
        orders = [np.random.default_rng(seed).permutation(100).tolist() for seed in range(3)]
        orders[0] *= 100  # goes on until it is killed
        arguments = [(server.address, cache, limit, order) for order in orders]
        started = [context.Process(target=read_all, args=each) for each in arguments]
        for process in started:
            process.start()
        while not used_bytes(cache):
            time.sleep(0.01)
        started[0].kill()
        for process in started:
            process.join()
    assert [process.exitcode for process in started] == [-signal.SIGKILL, 0, 0]
    assert 0 < used_bytes(cache) <= limit


def test_a_failure_that_passes_is_tried_again_and_one_that_lasts_ends_the_run(server: FolderServer) -> None:
    with closing(remote(server)) as catalog:
        expected = catalog.read(7)
        server.failures = [500, 429, "cut", "cut", "close", 502]
        assert (catalog.read(7) == expected).all()
        assert server.failures == []
        for failure in (503, "cut", "close"):
            server.failures = [failure] * (2 * remote_folder.RETRIES)
            with pytest.raises(UserError, match=r"train-00000\d.tar cannot be read: .*--resume auto"):
                catalog.read(7)
            assert len(server.failures) <= remote_folder.RETRIES


def test_what_is_wrong_with_a_server_is_said(server: FolderServer, tmp_path: Path) -> None:
    shards = list((server.folder / "train").glob("*.tar"))
    with closing(remote(server, cache=tmp_path / "cache")) as catalog:
        catalog.read(0)
        server.version = "2"
        with pytest.raises(UserError, match=r"train-00000\d.tar was changed: .* version 2.*--resume auto"):
            [catalog.read(number) for number in range(40)]
    with closing(remote(server)) as catalog:
        for shard in shards:
            shard.write_bytes(shard.read_bytes() + b"more")
        with pytest.raises(UserError, match=r"was changed: .* its list says [\d,]+ bytes.*Upload"):
            catalog.read(0)
        for shard in shards:
            shard.write_bytes(b"less")
        with pytest.raises(UserError, match=r"train-00000\d.tar cannot be read: .*416.*upload"):
            catalog.read(1)
    server.answers_ranges = False
    with pytest.raises(UserError, match="range requests, such as nginx"):
        remote(server)
    server.answers_ranges = True
    (server.folder / "train" / "images.catalog").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"images\.catalog is damaged, .*horovod-volo pack"):
        remote(server)
    (server.folder / "train" / "images.catalog").unlink()
    with pytest.raises(UserError, match=r"train/images.catalog .*404.*`horovod-volo pack` writes"):
        remote(server)
    with pytest.raises(UserError, match=r"Connection refused.*--resume auto"):
        RemoteFolder("http://127.0.0.1:1").read("x", 0, 1)


def test_an_address_with_a_password_is_refused_and_not_printed(server, capsys):
    address = server.address.replace("://", "://jane:s3cret@") + "/a"
    assert train([address, "--dry-run"]) == 2
    shown = capsys.readouterr()
    with pytest.raises(UserError) as raised:
        shared_catalog(address, "train", None, ALONE)
    for text in (shown.err, str(raised.value)):
        assert f"Give {server.address}/a, and write `machine 127.0.0.1 login USER password P" in text
    assert not any(secret in shown.out + shown.err + str(raised.value) for secret in ("jane", "s3cret"))
    assert server.connections == 0


def test_user_and_password_are_those_of_netrc(server, tmp_path, monkeypatch):
    """A file without the password, or one that cannot be used, matters only where one is wanted."""
    file = tmp_path / ".netrc"
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    right = b"machine 127.0.0.1 login jane password s3cret\n"
    elsewhere = b"machine elsewhere.test login jane password s3cret"
    of_any = elsewhere + b"\ndefault login jane password s3cret\n"
    # The last is open to all.
    cases = [(None, 0), (of_any, 0o600), (elsewhere + b"\xff", 0o600), (right, 0o600), (right, 0o644)]
    for content, mode in cases:
        server.login = ("", "")
        if content is not None:
            file.write_bytes(content)
            file.chmod(mode)
        remote(server).close()
        server.login = ("Authorization", "Basic " + base64.b64encode(b"jane:s3cret").decode())
        if (content, mode) == (right, 0o600):
            with closing(remote(server)) as catalog:
                assert len(contents(catalog)) == 40
                assert "s3cret" not in catalog.source + catalog.location(0)
            continue
        with pytest.raises(UserError, match=r"401 Unauthorized.*~/\.netrc.*chmod 600") as raised:
            remote(server)
        assert "s3cret" not in str(raised.value)
    monkeypatch.setenv("NETRC", str(file.rename(tmp_path / "logins")))
    remote(server).close()


def test_a_proxy_may_want_a_password(server: FolderServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.login = ("Proxy-Authorization", "Basic " + base64.b64encode("jane:p@ss/wörd".encode()).decode())
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", server.address.replace("://", "://jane:p%40ss%2Fw%C3%B6rd@"))
    with closing(shared_catalog("http://shards.test", "train", None, ALONE)) as catalog:
        assert len(contents(catalog)) == 40
    monkeypatch.setenv("http_proxy", server.address.replace("://", "://jane:other@"))
    with pytest.raises(UserError, match=r"407 Proxy Auth.*https_proxy or http_proxy") as raised:
        shared_catalog("http://shards.test", "train", None, ALONE)
    assert "jane" not in str(raised.value)


def test_a_store_that_says_403_of_what_is_not_there(server: FolderServer) -> None:
    """As S3 does for who may not list its files."""
    server.absent = 403
    (server.folder / "val").rename(server.folder / "validation")
    with closing(remote(server, "val")) as catalog:
        assert catalog.source == f"{server.address}/validation"
    shutil.rmtree(server.folder / "validation")
    with pytest.raises(UserError, match=r"/val/images\.catalog cannot be read: .*403 Forbidden.*credentials"):
        remote(server, "val")


def test_a_list_that_another_run_has_open_is_not_replaced(server: FolderServer, tmp_path: Path) -> None:
    inodes = set()
    for _ in range(2):
        with closing(shared_catalog(server.address, "train", tmp_path / "lists", ALONE)) as catalog:
            inodes.add(catalog.path.stat().st_ino)
    assert len(inodes) == 1


def test_shards_of_others_with_repeated_draws_of_rare_classes(tmp_path, monkeypatch):
    members = [
        (f"{n}.{kind}", data)
        for n in range(24)
        for kind, data in (("jpg", picture(n)), ("cls", b"%d" % (n > 1)))
    ]
    for split in ("train", "val"):
        write_tar(tmp_path / "100%25 #1" / split / "a shard#1, ä.tar", members)
    assert main([str(tmp_path / "100%25 #1"), "--catalog"]) == 0
    announced = list[int]()
    read_ahead = RemoteCatalog.read_ahead

    def noted(catalog: RemoteCatalog, indices: NDArray[np.int64]) -> None:
        announced.extend(indices.tolist())
        read_ahead(catalog, indices)

    monkeypatch.setattr(RemoteCatalog, "read_ahead", noted)
    local = build_catalog(str(tmp_path / "100%25 #1"), "train", None)
    with serving(tmp_path) as server:
        address = f"{server.address}/100%2525 %231"  # the name of the folder, quoted
        with closing(shared_catalog(address, "train", None, ALONE)) as catalog:
            assert contents(catalog) == contents(local)
            found = samples(catalog, balance=1.0)
    assert found == samples(local, balance=1.0)
    assert announced == [index for indices, _ in found for index in indices]
    assert len(announced) > len(set(announced))


@pytest.fixture
def stores(server: FolderServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderServer:
    """The environment of object stores, all of which are at the server: a bucket is a folder there."""
    google = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    google |= {"gcs_base_url": server.address, "disable_oauth": True}
    variables = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    variables |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": server.address}
    variables |= {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ENDPOINT": server.address}
    variables |= {"AZURE_SKIP_SIGNATURE": "true", "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(google)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (server.folder / "bucket").mkdir()
    shutil.copytree(server.folder / "train", server.folder / "bucket" / "a 100%25 #1, ä" / "train")
    return server


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_object_stores_give_the_samples_of_local_shards(packed, stores, tmp_path, scheme):
    local = build_catalog(str(packed), "train", None)
    address = f"{scheme}://bucket/a 100%25 #1, ä"
    for cache in (Data(), Data(cache_dir=str(tmp_path / "cache"), cache_gib=1.0)):
        with closing(shared_catalog(address, "train", None, ALONE, cache=cache)) as catalog:
            assert catalog.digest == local.digest
            assert contents(catalog) == contents(local)
            assert catalog.location(0).startswith(f"{address}/train/train-000000.tar, bytes ")


def test_credentials_of_s3_are_those_of_the_tools_of_aws(stores, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def read() -> str:
        RemoteFolder("s3://bucket/a 100%25 #1, ä/train").read("images.catalog", 0, 1)
        return stores.authorizations[-1]

    with pytest.raises(UserError, match=r"Set AWS_PROFILE.*AWS_SKIP_SIGNATURE=true"):
        read()
    monkeypatch.setenv("AWS_PROFILE", "mine")
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = ABC\naws_secret_access_key = s3cret\n")
    assert "Credential=ABC/" in read()
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert read() == ""
