"""The site of docs/: its navigation has every page, what is generated is up to date, and nothing is requested
from other hosts.

`./tools/docs` builds the site in an environment of its own, which the last tests use if it is there.
"""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from horovod_volo.bench.results import read_records

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = DOCS / "site" / "mkdocs.yml"
REGENERATE = "run ./tools/docs generate, and commit what it changes"


def pages_in(navigation: Any) -> list[str]:
    """Return the pages of a navigation, in its order."""
    if isinstance(navigation, str):
        return [navigation]
    entries = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for entry in entries for page in pages_in(entry)]


def test_the_navigation_has_every_page_once() -> None:
    listed = pages_in(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"])
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert set(listed) == pages, f"list each page of docs/ under nav in {CONFIG.relative_to(ROOT)}"
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("program", "function", "folder"),
    [("docs_reference.py", "pages", DOCS / "reference"), ("docs_figures.py", "figures", DOCS / "figures")],
)
def test_generated_files_are_up_to_date(program: str, function: str, folder: Path) -> None:
    made = runpy.run_path(str(ROOT / "tools" / program))[function]()
    assert len(made) > 1
    for name, text in made.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"{name}: {REGENERATE}"


def test_the_readme_claims_recorded_figures() -> None:
    claims = (ROOT / "README.md").read_text(encoding="utf-8")
    values = {f"{x['name']}: {y['label']}": y["value"] for x in read_records() for y in x["figures"]}
    small = "reduce volo_d1 64 px: exposed, relative to"
    figures = {
        "1.92 x (range of": values["loader: faster than timm's loader"],
        "1.08 x (0.82": values["peers volo_d1 fp32 eager channels-last published: faster than eager"],
        "2.07 x: 2,783": values["peers volo_d1 bf16 eager: faster than eager"],
        "37 % compared with Horovod's": 100 * (1 - values[f"{small} stock Horovod's"]),
        "52 % compared with torch DDP": 100 * (1 - values[f"{small} torch DDP's"]),
    }
    for claim, value in figures.items():
        assert claim in claims.replace("\n", " "), f"change this test with the README: {claim}"
        assert float(claim.split()[0]) == pytest.approx(value, rel=0.01), claim


# --- the built site -----------------------------------------------------------------------------


# What a browser loads by itself from another host.
REQUEST = re.compile(
    r'src="(?:https?:)?//|<link(?=[^>]+href="(?:https?:)?//)(?![^>]+rel="(?:canonical|prev|next|alternate)")'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a link that leads nowhere fails the build."""
    mkdocs = shutil.which("mkdocs", path=str(ROOT / "build" / "docs_venv" / "bin"))
    if mkdocs is None:
        message = "./tools/docs has not been run: it installs the programs that build the site"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    folder = tmp_path_factory.mktemp("site")
    command = [mkdocs, "build", "--strict", "--config-file", str(CONFIG), "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_requests_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    assert not (site / "site" / "mkdocs.yml").exists()
    for page in pages:
        assert not REQUEST.search(page.read_text(encoding="utf-8")), page.name
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", text), style.name
