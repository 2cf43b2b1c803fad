"""Shards on a server give the samples of the same shards on a local disk, in the same order, or an error."""

from __future__ import annotations

import base64
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from cache_process import BLOCK, read_all, used_bytes
from image_loaders import evaluated_images, train_loader
from numpy.typing import NDArray
from shard_writers import picture, write_tar

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.engine.shared_catalog import cache_warnings, shared_catalog
from horovod_volo.pack import main
from horovod_volo.remote import block_cache, ranges
from horovod_volo.remote.http_source import HttpSource
from horovod_volo.remote.ranges import RemoteFile
from horovod_volo.remote.remote_catalog import CacheSettings, ReadAhead, RemoteCatalog
from horovod_volo.remote.s3_source import _as_error
from horovod_volo.train import main as train
from tests.range_server import FolderServer, serving

ALONE = World.single()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    make_demo_set(folder / "images", train=40, val=20, image_side=48)
    assert (
        main([str(folder / "images"), str(folder / "shards"), "--workers", "1", "--shard-images", "16"]) == 0
    )
    return folder / "shards"


@pytest.fixture
def server(packed: Path, tmp_path: Path) -> Iterator[FolderServer]:
    shutil.copytree(packed, tmp_path / "served")
    with serving(tmp_path / "served") as server:
        yield server


@pytest.fixture(autouse=True)
def small_blocks_and_short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(ranges, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(ranges, "LONGEST_PAUSE_SECONDS", 0.01)


def remote(
    server: FolderServer, split: str = "train", cache: Path | None = None, gib: float = 1.0
) -> RemoteCatalog:
    settings = CacheSettings("" if cache is None else str(cache), gib)
    catalog = shared_catalog(server.address, split, None, ALONE, cache=settings)  # type: ignore[arg-type]
    assert isinstance(catalog, RemoteCatalog)
    return catalog


def content(catalog: Catalog) -> list[tuple[str, int, bytes]]:
    numbers = range(len(catalog))
    return [(catalog.name(n), int(catalog.targets[n]), catalog.read(n).tobytes()) for n in numbers]


def samples(
    catalog: Catalog, first_step: int = 0, **settings: object
) -> list[tuple[list[int], torch.Tensor]]:
    """Return the indices and the augmented pixels of an epoch's batches."""
    with closing(train_loader(catalog, Data(batch_size=4, **settings), rank=1, size=2)) as loader:  # type: ignore[arg-type]
        return [(batch.indices.tolist(), batch.images.clone()) for batch in loader.batches(1, first_step)]


@pytest.mark.parametrize("has_cache", [False, True])
def test_samples_are_those_of_local_shards(
    packed: Path, server: FolderServer, tmp_path: Path, has_cache: bool
) -> None:
    local = build_catalog(str(packed), "train", None)
    expected = samples(local, block_shuffle=8)
    with closing(remote(server, cache=tmp_path / "cache" if has_cache else None)) as catalog:
        assert (catalog.digest, catalog.classes) == (local.digest, local.classes)
        assert "classes.txt" not in str(server.requests)
        assert server.bytes_of(".tar") == 0  # the list needs no shard
        assert content(catalog) == content(local)
        for first_step in (0, 3):  # the second as after a restart
            found = samples(catalog, first_step, block_shuffle=8)
            assert len(found) == 5 - first_step
            for (indices, pixels), (own, own_pixels) in zip(expected[first_step:], found, strict=True):
                assert indices == own
                assert pixels.equal(own_pixels)
        assert catalog.location(0).startswith(f"{server.address}/train/train-000000.tar, bytes ")
    assert server.connections <= 1 + 16 + 2 * 2 * 2  # they are kept open


def test_each_image_that_is_announced_is_read_once_and_none_is_kept_for_ever() -> None:
    reads = list[int]()

    def read(index: int) -> bytes:
        reads.append(index)
        return b"%d" % index

    batches = np.arange(3000).reshape(6, 500)
    ahead = ReadAhead(read)
    with closing(ahead), ThreadPoolExecutor(4) as pool:
        for batch in batches:
            ahead.expect(batch)
        for batch in batches:
            taken = list(pool.map(ahead.take, batch.tolist()))
            assert taken == [b"%d" % index for index in batch]
        assert sorted(reads) == list(range(3000))
        # An epoch that is left in the middle: its images are dropped when the next epoch begins.
        ahead.expect(np.arange(100))
        ahead.expect(np.arange(200, 300))
        while len(reads) < 3200:
            time.sleep(0.001)
        ahead.take(200)
        ahead.take(7)
    assert reads.count(200) == 2
    assert reads.count(7) == 3


def test_an_evaluation_reads_held_out_shards(packed: Path, server: FolderServer) -> None:
    with closing(remote(server, "val")) as catalog:
        found, expected = (
            evaluated_images(images, Data(batch_size=8))
            for images in (catalog, build_catalog(str(packed), "val", None))
        )
        assert found.equal(expected)


def test_without_a_cache_each_image_is_one_range(server: FolderServer) -> None:
    with closing(remote(server)) as catalog:
        listed = len(server.requests)
        encoded = catalog.read(5)
        assert [length for _, _, length in server.requests[listed:]] == [len(encoded)]


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
        expected = content(catalog)
    blocks = sorted(path for path in (cache / "blocks").rglob("*") if path.is_file())
    blocks[0].write_bytes(bytes(blocks[0].stat().st_size))
    blocks[1].write_bytes(blocks[1].read_bytes()[:100])
    blocks[2].write_bytes(b"")
    with closing(remote(server, cache=cache)) as catalog:
        assert content(catalog) == expected


def test_a_fault_of_the_cache_is_no_damage_of_samples(server: FolderServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with closing(remote(server, cache=cache)) as catalog:
        catalog.read(0)
        shutil.rmtree(cache / "locks")
        with pytest.raises(UserError, match=r"the cache in .*cache cannot be used: No such file"):
            [catalog.read(number) for number in range(40)]


def test_the_cache_stays_below_its_limit_with_several_processes(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "file").write_bytes(
        b"".join(bytes([number % 251]) * 1000 for number in range(100))
    )
    limit = 6 * (BLOCK + 4)
    with serving(tmp_path / "served") as server:
        context = multiprocessing.get_context("spawn")
        orders = [np.random.default_rng(seed).permutation(100).tolist() for seed in range(2)]
        started = [
            context.Process(
                target=read_all, args=(f"{server.address}/file", tmp_path / "cache", limit, order)
            )
            for order in orders
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
    assert [process.exitcode for process in started] == [0, 0]
    assert 0 < used_bytes(tmp_path / "cache") <= limit


@pytest.mark.parametrize("failures", [[503, 429], ["cut", "cut"], ["close"], [500, "cut", "close", 502]])
def test_a_failure_that_passes_is_tried_again(server: FolderServer, failures: list[object]) -> None:
    with closing(remote(server)) as catalog:
        expected = catalog.read(7)
        server.failures = failures
        assert (catalog.read(7) == expected).all()
        assert server.failures == []


def test_a_failure_that_lasts_ends_the_run(server: FolderServer) -> None:
    with closing(remote(server)) as catalog:
        server.failures = [503] * ranges.ATTEMPTS
        with pytest.raises(
            UserError, match=r"train-00000\d.tar cannot be read, in 8 attempts; the last: 503"
        ):
            catalog.read(7)


def test_what_is_wrong_with_a_server_is_said(server: FolderServer, tmp_path: Path) -> None:
    with closing(remote(server, cache=tmp_path / "cache")) as catalog:
        catalog.read(0)
        server.version = "2"
        with pytest.raises(UserError, match=r"train-00000\d.tar was changed while it was read. Restart"):
            [catalog.read(number) for number in range(40)]
    server.version = "1"
    with closing(remote(server)) as catalog:
        for shard in (server.folder / "train").glob("*.tar"):
            shard.write_bytes(shard.read_bytes() + b"more")
        with pytest.raises(UserError, match=r"bytes, but its list says [\d,]+: it was changed. Upload"):
            catalog.read(0)
        for shard in (server.folder / "train").glob("*.tar"):
            shard.unlink()
        with pytest.raises(UserError, match=r"the server has no http.*train-00000\d.tar \(404"):
            catalog.read(1)
    server.answers_ranges = False
    with pytest.raises(UserError, match="does not answer range requests"):
        remote(server)
    server.answers_ranges = True
    (server.folder / "train" / "images.catalog").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"images\.catalog is damaged, or of"):
        remote(server)
    (server.folder / "train" / "images.catalog").unlink()
    with pytest.raises(
        UserError, match=r"has no train/images.catalog. `tools/pack` writes images.catalog beside"
    ):
        remote(server)
    with pytest.raises(UserError, match="cannot be read, in 8 attempts; the last: ConnectionRefusedError"):
        RemoteFile(HttpSource(), "http://127.0.0.1:1/x").read(0, 1)


def test_a_file_that_grows_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_PART_BYTES", 1000)
    (tmp_path / "file").write_bytes(bytes(range(250)) * 10)
    with serving(tmp_path) as server, closing(HttpSource()) as source:
        file = RemoteFile(source, f"{server.address}/file")
        assert file.read_all() == bytes(range(250)) * 10
        (tmp_path / "file").write_bytes(bytes(range(250)) * 11)
        with pytest.raises(UserError, match="file was changed while it was read"):
            file.read_all()


def test_a_redirection_is_followed(server: FolderServer) -> None:
    server.redirects = "/elsewhere"
    with closing(remote(server)) as catalog:
        assert len(content(catalog)) == 40


def basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"


def test_an_address_with_a_password_is_refused_and_not_printed(
    server: FolderServer, capsys: pytest.CaptureFixture[str]
) -> None:
    address = server.address.replace("://", "://jane:s3cret@") + "/a"
    assert train([address, "--dry-run"]) == 2
    shown = capsys.readouterr()
    with pytest.raises(UserError) as raised:
        shared_catalog(address, "train", None, ALONE)
    for text in (shown.err, str(raised.value)):
        assert f"Give {server.address}/a, and write `machine 127.0.0.1 login USER password P" in text
    assert not any(secret in shown.out + shown.err + str(raised.value) for secret in ("jane", "s3cret"))
    assert server.connections == 0


def test_user_and_password_are_those_of_netrc(
    server: FolderServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    server.login = ("Authorization", basic("jane:s3cret"))
    with pytest.raises(
        UserError, match=r"401 Unauthorized. Give a user and a password in ~/\.netrc on every h"
    ):
        remote(server)
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login jane password s3cret\n")
    (tmp_path / ".netrc").chmod(0o644)
    with pytest.raises(
        UserError, match=r"401 Unauthorized\. ~/\.netrc cannot be used\..* chmod 600"
    ) as raised:
        remote(server)
    assert "s3cret" not in str(raised.value)
    (tmp_path / ".netrc").chmod(0o600)
    with closing(remote(server)) as catalog:
        assert len(content(catalog)) == 40
        assert "s3cret" not in catalog.source + catalog.location(0)
    (tmp_path / ".netrc").rename(tmp_path / "passwords")
    monkeypatch.setenv("NETRC", str(tmp_path / "passwords"))
    with closing(remote(server)) as catalog:
        assert len(catalog) == 40


@pytest.mark.parametrize("how", ["open to all", "not UTF-8", "no file", "no folder"])
def test_a_netrc_that_cannot_be_used_matters_only_where_a_password_is_wanted(
    server: FolderServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", "/dev/null" if how == "no folder" else str(tmp_path))
    file = tmp_path / ".netrc"
    if how == "no file":
        file.mkdir()
    else:
        ending = b"\xff" if how == "not UTF-8" else b""
        file.write_bytes(b"machine elsewhere.test login jane password s3cret" + ending)
        file.chmod(0o644 if how == "open to all" else 0o600)
    with closing(remote(server)) as catalog:
        assert len(content(catalog)) == 40
    server.login = ("Authorization", basic("jane:s3cret"))
    with pytest.raises(UserError, match=r"401 Unauthorized\. ~/\.netrc cannot be used"):
        remote(server)


def test_a_password_is_sent_to_the_very_host_that_netrc_names(
    server: FolderServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirect may lead to a store that refuses a signed address with a further password."""
    (tmp_path / "netrc").write_text("machine a.test login a password b\ndefault login jane password s3cret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server.login = ("Authorization", basic("jane:s3cret"))
    with pytest.raises(UserError, match=r"401 Unauthorized\. Give a user and a password"):
        remote(server)


def test_a_proxy_may_want_a_password(server: FolderServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.login = ("Proxy-Authorization", basic("jane:p@ss/wörd"))
    monkeypatch.setenv("no_proxy", "")
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", server.address.replace("://", "://jane:p%40ss%2Fw%C3%B6rd@"))
    with closing(shared_catalog("http://shards.test", "train", None, ALONE)) as catalog:
        assert len(content(catalog)) == 40
        assert catalog.location(0).startswith("http://shards.test/train/train-000000.tar, bytes ")
    with closing(HttpSource()) as source, pytest.raises(ranges.TemporaryError, match="502"):
        source.read("https://shards.test/train/images.catalog", 0, 1)
    assert server.tunnels == [("shards.test:443", server.login[1])]
    for status, message in (
        (407, r"407 Proxy Authentication Required\. Give the proxy's user and password in https_proxy"),
        (403, r"403 Forbidden\. Check the proxy, or name the host in no_proxy\."),
    ):
        server.tunnel_status = status
        with pytest.raises(UserError, match=f"the proxy refuses shards.test: {message}") as raised:
            shared_catalog("https://shards.test", "train", None, ALONE)
        assert "jane" not in str(raised.value)
    assert len(server.tunnels) == 3, "a refusal is not asked for again"
    server.login = ("Proxy-Authorization", "")
    monkeypatch.setenv("http_proxy", "http://jane:p/w@127.0.0.1:1")
    with pytest.raises(
        UserError, match=r"the port of the proxy is no number\. Write / in passwords as %2F\."
    ):
        shared_catalog("http://shards.test", "train", None, ALONE)
    monkeypatch.setenv("http_proxy", server.address.replace("://", "://jane:other@"))
    with pytest.raises(
        UserError, match=r"shards\.test/train/images\.catalog cannot be read: 407 Proxy A"
    ) as raised:
        shared_catalog("http://shards.test", "train", None, ALONE)
    assert "jane" not in str(raised.value)


@pytest.mark.parametrize("name", ["my shards", "Straßenbäume", "100%25 #1"])
def test_names_of_folders_are_quoted(server: FolderServer, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "served" / unquote(name)
    folder.mkdir()
    for split in ("train", "val"):
        shutil.copytree(server.folder / split, folder / split)
    address = name.replace("#", "%23")
    with closing(shared_catalog(f"{server.address}/{address}", "train", None, ALONE)) as catalog:
        assert len(content(catalog)) == 40
    server.redirects = "/über uns"
    with closing(remote(server)) as catalog:
        assert len(content(catalog)) == 40


def test_a_store_that_says_403_of_what_is_not_there(server: FolderServer) -> None:
    """As S3 does for who may not list its files."""
    server.absent = 403
    (server.folder / "val").rename(server.folder / "validation")
    with closing(remote(server, "val")) as catalog:
        assert catalog.source == f"{server.address}/validation"
    shutil.rmtree(server.folder / "validation")
    with pytest.raises(UserError, match=r"refuses http.*/val/images\.catalog: 403 Forbidden\. Check"):
        remote(server, "val")
    for code, kind in (("AccessDenied", ranges.RefusedError), ("ExpiredToken", UserError)):
        assert type(_as_error("s3://bucket/val/images.catalog", {"Error": {"Code": code}})) is kind


def test_a_list_that_another_run_has_open_is_not_replaced(server: FolderServer, tmp_path: Path) -> None:
    inodes = set()
    for _ in range(2):
        with closing(shared_catalog(server.address, "train", tmp_path / "lists", ALONE)) as catalog:
            assert catalog.path is not None
            inodes.add(catalog.path.stat().st_ino)
    assert len(inodes) == 1


def test_an_answer_of_another_server_that_is_not_wanted_is_not_read_as_the_next_one(
    server: FolderServer, tmp_path: Path
) -> None:
    (tmp_path / "front").mkdir()
    with serving(tmp_path / "front") as front, closing(HttpSource()) as source:
        front.redirects, front.elsewhere, server.redirects = "/there", server.address, "/there"
        server.answers_ranges = False
        shard = RemoteFile(source, f"{front.address}/train/train-000000.tar")
        with pytest.raises(UserError, match=r"the server of http.*tar does not answer range requests"):
            shard.read(0, 8)
        server.answers_ranges = True
        before = server.connections
        assert shard.read(0, 8) == (server.folder / "train" / "train-000000.tar").read_bytes()[:8]
        assert server.connections == before + 1  # the connection with the rest of the answer was closed
        assert len(server.requests) == 2


def test_a_shard_that_holds_no_image_there_is_a_bad_sample(server: FolderServer) -> None:
    for shard in (server.folder / "train").glob("*.tar"):
        shard.write_bytes(bytes(shard.stat().st_size))
    with (
        closing(remote(server)) as catalog,
        pytest.raises(BadSampleError, match="does not begin as an image"),
    ):
        catalog.read(0)


def test_other_shards_are_listed_too(tmp_path: Path) -> None:
    for split in ("train", "val"):
        members = [
            (f"{n}.{kind}", data)
            for n in range(3)
            for kind, data in (("jpg", picture(n)), ("cls", b"%d" % n))
        ]
        write_tar(tmp_path / split / "a shard#1, ä.tar", members)
    assert main([str(tmp_path), "--catalog"]) == 0
    with serving(tmp_path) as server, closing(remote(server)) as catalog:
        assert content(catalog) == content(build_catalog(str(tmp_path), "train", None))


def test_repeated_draws_of_rare_classes_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [
        (f"{n}.{kind}", data)
        for n in range(24)
        for kind, data in (("jpg", picture(n)), ("cls", b"%d" % (n > 1)))
    ]
    for split in ("train", "val"):
        write_tar(tmp_path / split / "a.tar", members)
    assert main([str(tmp_path), "--catalog"]) == 0
    local = build_catalog(str(tmp_path), "train", None)
    expected = samples(local, balance=1.0)
    with serving(tmp_path) as server, closing(remote(server)) as catalog:
        announced = list[int]()

        def read_ahead(indices: NDArray[np.int64]) -> None:
            announced.extend(indices.tolist())
            RemoteCatalog.read_ahead(catalog, indices)

        monkeypatch.setattr(catalog, "read_ahead", read_ahead)
        found = samples(catalog, balance=1.0)
    for (indices, pixels), (own, own_pixels) in zip(expected, found, strict=True):
        assert indices == own
        assert pixels.equal(own_pixels)
    assert announced == [index for indices, _ in found for index in indices]
    assert len(announced) > len(set(announced))


def test_a_cache_that_is_too_small_for_a_random_order_is_a_warning(
    server: FolderServer, tmp_path: Path
) -> None:
    with closing(remote(server, cache=tmp_path, gib=1e-5)) as catalog:
        small = Data(cache_dir="x", cache_gib=1e-5)
        (warning,) = cache_warnings(small, catalog)
        assert "holds a part of the 0.0 GiB of the training shards" in warning
        assert cache_warnings(Data(cache_dir="x", cache_gib=1e-5, block_shuffle=8), catalog) == []
        assert cache_warnings(Data(cache_dir="x"), catalog) == []
