"""scripts/release: what it refuses, and in the long run a release of this commit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHANGELOG = "services/guides/changelog.md"
# `hearth-0.2.0` is a folder of a guide
UNPUBLISHED = re.compile(
    r"(?<![\w./-])hearth(?:-serve)?\[|pip install[^\n`]*(?<![\w./-])hearth(?:-serve)?(?![\w-])"
)
EXTRA = re.compile(r"pip install '\.\[(\w+)\]'")
GIT = ("git", "-c", "user.name=tests", "-c", "user.email=tests@example.invalid")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of one commit, with what the script reads before it builds."""
    tree = tmp_path / "tree"
    for name in ("scripts/release", "scripts/environment.sh", "pyproject.toml", ".gitignore"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / CHANGELOG).parent.mkdir(parents=True)
    sections = "# Changelog\n\n## 0.3.0, not released\n\n## 0.2.0, not released\n\n- Something.\n"
    (tree / CHANGELOG).write_text(sections)
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "Begin"), ("tag", "v0.1.0")):
        subprocess.run([*GIT, *words], cwd=tree, check=True)
    return tree


def release(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(tree / "scripts/release"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=tree)


def test_what_cannot_be_released_is_refused_in_one_line(tree: Path, tmp_path: Path) -> None:
    cases = {
        (): "usage: ",
        ("0.2.0",): "usage: ",
        ("0.2", "out"): "0.2 is not a version",
        ("0.2.0", str(tmp_path)): "exists already",
        ("0.1.0", "out"): "the tag v0.1.0 exists already",
        ("0.4.0", "out"): "has no section '## 0.4.0, not released'",
        ("0.3.0", "out"): "says nothing of 0.3.0",
        ("0.2.0", "out", "--fast"): "no option --fast",
        ("0.2.0", "out", "more"): "usage: ",
        ("0.2.0", "out", "--quick"): "--quick needs ",
    }
    for words, expected in cases.items():
        result = release(tree, *words)
        assert (result.returncode, result.stdout) == (2, ""), (words, result)
        (line,) = result.stderr.splitlines()
        assert line.startswith("release: ") and expected in line
    (tree / "pyproject.toml").write_text("")
    assert "changes without a commit" in release(tree, "0.2.0", "out").stderr
    assert not (tree / "out").exists()


def test_no_text_tells_to_install_what_is_not_published() -> None:
    """Extras are installed from the clone, by their names in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told, named = [], set[str]()
    for path, text in texts():
        told += [f"{path.relative_to(ROOT)}: {each}" for each in UNPUBLISHED.findall(text)]
        named.update(EXTRA.findall(text))
    assert told == []
    assert {"nixl", "tracing"} <= named <= set(project["optional-dependencies"])


def test_names_that_are_not_published_are_found() -> None:
    published = ("pip install '.[nixl]'", "pip install openai", "pip install /opt/hearth-0.2.0")
    for text in (*published, "`pip install openai`, then `hearth chat`", "the `hearth` of PyPI"):
        assert UNPUBLISHED.search(text) is None, text
    for text in ("pip install 'hearth-serve[nixl]'", "pip install -U hearth", "needs hearth[nixl]"):
        assert UNPUBLISHED.search(text), text


def texts() -> Iterator[tuple[Path, str]]:
    """Yields what users read: documents, and code with its messages."""
    folders = [ROOT / name for name in ("services", "shared", "kernels", "benchmarks")]
    for path in (path for each in folders for path in each.rglob("*")):
        if path.suffix in (".py", ".md"):
            yield path, path.read_text()
    for path in (ROOT / "README.md", *(ROOT / "scripts").iterdir()):
        if path.is_file():
            yield path, path.read_text()


@pytest.mark.long
def test_release_of_this_commit(tmp_path: Path) -> None:
    """Packages are installed for it: minutes."""
    tree, out = tmp_path / "clone", tmp_path / "out"
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(tree)], check=True)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    text = (tree / CHANGELOG).read_text()
    (tree / CHANGELOG).write_text(f"{text}\n## 9.8.7, not released\n\n- **Tried** by a test.\n")
    subprocess.run([*GIT, "commit", "-qam", "Describe"], cwd=tree, check=True)
    result = release(tree, "9.8.7", str(out), "--quick")
    assert result.returncode == 0, result.stderr
    names = {each.name for each in out.iterdir()}
    built = {"hearth_serve-9.8.7-py3-none-any.whl", "hearth_serve-9.8.7.tar.gz"}
    assert names == {*built, "NOTES.md", "SHA256SUMS", "sbom.cdx.json"}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=out, check=True)
    assert "**Tried** by a test" in (out / "NOTES.md").read_text()
    sbom = json.loads((out / "sbom.cdx.json").read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["version"] == "9.8.7"
    needed = {"msgspec", "torch", "nats-py", "redis"}
    assert needed <= {each["name"] for each in sbom["components"]}
    assert tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"] == "9.8.7"
    assert "## 9.8.7, 20" in (tree / CHANGELOG).read_text()
