"""The page's files: headers, ETags, the check of Host, its size."""

from __future__ import annotations

import re

import httpx
import pytest

from services.gateway.operator.page.files import FOLDER, compact, read_files
from services.gateway.operator.page.headers import POLICY, HostCheck
from tests.services.gateway.conftest import Cluster

MAX_BYTES = 100 * 1024
MAX_LINES = 2200  # of code: without empty lines and comments
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def check_headers(response: httpx.Response) -> None:
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cross-origin-opener-policy"] == "same-origin"
    assert "access-control-allow-origin" not in response.headers


async def test_every_file_is_served_with_type_and_security_headers(cluster: Cluster) -> None:
    for name, file in read_files().items():
        response = await cluster.http.get(f"/page/{name}", headers={"authorization": ""})
        assert response.status_code == 200
        assert response.content == file.data
        assert response.headers["content-type"] == TYPES[name.rpartition(".")[2]]
        check_headers(response)


async def test_index_is_served_to_get_and_head(cluster: Cluster) -> None:
    page = await cluster.http.get("/")
    head = await cluster.http.head("/")
    assert page.content == read_files()["index.html"].data
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == page.headers["etag"]
    check_headers(page)


async def test_known_etag_gets_304(cluster: Cluster) -> None:
    etag = (await cluster.http.get("/page/app.js")).headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
    for given in (etag, f'"other", {etag}', f"W/{etag}", "*"):
        again = await cluster.http.get("/page/app.js", headers={"if-none-match": given})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
        check_headers(again)
    other = await cluster.http.get("/page/app.js", headers={"if-none-match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize("name", ["files.py", "..%2Fservice.py", "%2e%2e/app.py", "none.js", ""])
async def test_other_files_are_not_served(cluster: Cluster, name: str) -> None:
    assert (await cluster.http.get(f"/page/{name}")).status_code == 404


async def test_foreign_host_gets_404_on_loopback(cluster: Cluster) -> None:
    for path in ("/", "/page/app.js", "/v1/cluster", "/v1/cluster/events"):
        for host in (
            *("evil.example", "evil.example:8000", "localhost.evil.example", ""),
            *("127.evil.example", "127.0.0.1.evil.example", "127.0.0.1.evil.example:8000"),
        ):
            response = await cluster.http.get(path, headers={"host": host})
            assert response.status_code == 404, (path, host)
    for host in (
        "localhost",
        "LOCALHOST:8000",
        "127.1.2.3:8000",
        "127.0.0.1:1",
        "[::1]:8000",
        "[::1]",
    ):
        assert (await cluster.http.get("/", headers={"host": host})).status_code == 200, host


def test_other_addresses_take_every_host() -> None:
    assert not HostCheck("0.0.0.0")._is_loopback
    assert not HostCheck("10.0.0.1")._is_loopback


async def test_gateway_without_page(cluster: Cluster) -> None:
    async with cluster.beside(page=False) as beside:
        assert (await beside.http.get("/page/app.js")).status_code == 404
        assert (await beside.http.get("/")).json() == {"name": "hearth"}
        assert (await beside.http.head("/")).status_code == 200


def test_page_is_small_and_names_no_other_origin() -> None:
    files = read_files()
    assert sum(len(file.data) for file in files.values()) <= MAX_BYTES
    lines = [each.strip() for file in files.values() for each in file.data.splitlines()]
    assert sum(bool(each) and not each.startswith(b"//") for each in lines) <= MAX_LINES
    for name, file in files.items():
        text = file.data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, name
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ):
            assert forbidden not in text, (name, forbidden)


def test_lines_of_files_are_kept_without_indentation_and_comments() -> None:
    script = b"// Of a file.\nlet a = `b`; // c\n  // d\n  a = 'e  f';\n"
    assert compact(".js", script) == b"\nlet a = `b`;\na = 'e  f';\n"
    assert compact(".js", b"a(); // `b` is kept\n") == b"a(); // `b` is kept\n"
    css = b"a > b, c:not(d) { margin: calc(1px + 2px) 0; }\n"
    assert compact(".css", css) == b"a > b,c:not(d){margin:calc(1px + 2px) 0;}\n"
    for path in FOLDER.glob("*.js"):  # no string goes on in the next line
        lines = [each for each in path.read_text().splitlines() if "= /" not in each]
        assert all(line.count("`") % 2 == 0 for line in lines), path


def test_index_has_no_inline_script_or_style() -> None:
    text = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", text)
    assert all("src=" in each for each in re.findall(r"<script[^>]*>", text))
    assert re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL) == [""]
