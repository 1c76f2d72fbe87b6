"""`hearth verify` offline: every manipulation is found, and each has its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import pytest
from msgspec import structs

from services.cli.verify.comparison import replay_finding
from shared.receipts.jws import JwkSet, jwk_of, signed_jws
from shared.receipts.receipt import (
    AnswerReceipt,
    IssuedReceipt,
    PlacedProcess,
    decoded_bytes,
    encoded_bytes,
    payload_hash,
)
from shared.tenancy.tenant_copy import SigningKey
from tests.services.cli.in_process import call_hearth
from tests.support.services.receipts import ANSWER, NUMERICS, PROMPT, RECEIPT_SALT, receipt

KEY, OTHER = SigningKey.of_secret("of a"), SigningKey.of_secret("of b")


def jws_of(found: AnswerReceipt, key: SigningKey = KEY) -> str:
    return signed_jws(found.payload, key.public, key.sign_jws)


class Folder:
    """Files for the command. Receipts are signed with the key of site a."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys = self.write("keys.json", JwkSet((jwk_of(KEY.public, "a"),)))
        found = receipt()
        self.receipt = self.write(
            "receipt.json",
            IssuedReceipt(
                request_id=found.request_id,
                receipt=jws_of(found),
                hash=payload_hash(found.payload),
                salt=RECEIPT_SALT.text,
            ),
        )
        self.prompt = self.write("prompt.json", PROMPT)
        self.answer = self.write("answer.json", [ANSWER])

    def write(self, name: str, value: Any) -> str:
        path = self.path / name
        path.write_bytes(msgspec.json.encode(value))
        return str(path)

    def verify(self, given: str, *options: str, key: str = "") -> CompletedProcess[str]:
        return call_hearth(("verify", given, "--key", key or self.keys, *options), {})


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_receipt_that_holds(folder: Folder) -> None:
    options = ("--prompt", folder.prompt, "--answer", folder.answer)
    done = folder.verify(folder.receipt, *options)
    assert done.returncode == 0, done.stderr
    assert "KV from    prefill-1 (site a, region eu): 2 tokens" in done.stdout
    verdicts = [line.split()[:2] for line in done.stdout.splitlines()[-5:]]
    checks = ("signature", "hash", "salt", "prompt", "answer")
    assert verdicts == [[each, "ok"] for each in checks]
    shown = json.loads(folder.verify(folder.receipt, "--json").stdout)
    assert shown["receipt"]["model"]["weights"] == "digest-1"
    for key in (encoded_bytes(KEY.public), folder.write("jwk.json", jwk_of(KEY.public, "a"))):
        assert folder.verify(jws_of(receipt()), key=key).returncode == 0


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("region", b'"region":"eu"', b'"region":"us"'),
        ("weights", b'"digest-1"', b'"digest-2"'),
        ("time", b'"received_at":1000.0', b'"received_at":1000.1'),
        ("tokens", b'"num_tokens":2', b'"num_tokens":3'),
        ("seed", b'"seed":"7"', b'"seed":"8"'),
    ],
)
def test_changed_receipt_is_found(folder: Folder, name: str, old: bytes, new: bytes) -> None:
    head, payload, signature = jws_of(receipt()).split(".")
    changed = decoded_bytes(payload).replace(old, new)
    assert changed != decoded_bytes(payload), name
    done = folder.verify(f"{head}.{encoded_bytes(changed)}.{signature}")
    assert done.returncode == 1
    assert "it was changed" in done.stdout
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--prompt", [1, 2, 4], "not the tokens of this receipt"),
        ("--prompt", [1, 2], "not the tokens of this receipt"),
        ("--prompt", [[1, 2, 3], [4]], "not the tokens of this receipt"),
        ("--answer", [4, 6], "not the tokens of this receipt"),
        ("--answer", [[4, 5], []], "2 lists of tokens, expected 1"),
    ],
)
def test_changed_token_is_found(folder: Folder, option: str, value: Any, message: str) -> None:
    done = folder.verify(folder.receipt, option, folder.write("given.json", value))
    assert done.returncode == 1
    assert message in done.stdout


def test_changed_salt_and_hash_are_found(folder: Folder) -> None:
    done = folder.verify(folder.receipt, "--salt", "A" * 22)
    assert (done.returncode, "not the salt of this receipt" in done.stdout) == (1, True)
    done = folder.verify(folder.receipt, "--hash", "A" * 43)
    assert (done.returncode, "the response said AAAA" in done.stdout) == (1, True)


def test_receipt_of_another_cluster_is_one_clear_line(folder: Folder) -> None:
    done = folder.verify(jws_of(receipt(), OTHER))
    assert done.returncode == 1
    assert done.stdout.startswith("signature  wrong  of another site or cluster: signed with key ")
    assert len(done.stdout.splitlines()) == 1


def test_linked_site_signs_for_no_other(folder: Folder) -> None:
    """Its key is among those of this site's gateways, which it may show as its own, too."""
    linked = jwk_of(OTHER.public, "b"), jwk_of(KEY.public, "b")
    keys = folder.write("linked.json", JwkSet((jwk_of(KEY.public, "a"), *linked)))
    done = folder.verify(jws_of(receipt(), OTHER), key=keys)
    assert done.returncode == 1
    assert "of site 'b', which is none of site 'a' that it names" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert folder.verify(jws_of(receipt()), key=keys).returncode == 0
    there = structs.replace(receipt(), gateway=PlacedProcess(id="gateway", site="b"))
    assert folder.verify(jws_of(there, OTHER), key=keys).returncode == 0


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("no/such/file", (), "is no file, no receipt and no request's id"),
        ("a.b.c", (), "this text is no receipt"),
        ("{receipt}", ("--salt", "short"), "is not 16 bytes in base64url"),
        ("{receipt}", ("--key", "short"), "is no public key of Ed25519"),
        ("{receipt}", ("--key", "{prompt}"), "is no JWK and no JWK Set"),
        ("{receipt}", ("--prompt", "{request}"), "--prompt is a request, which --replay checks"),
        ("{receipt}", ("--prompt", "{bad}"), "--prompt must be token ids"),
        ("{receipt}", ("--replay",), "--replay needs the request"),
        ("{prompt}", (), "a receipt has 3 parts between dots, this text has 1"),
    ],
)
def test_bad_input(folder: Folder, given: str, options: tuple[str, ...], message: str) -> None:
    files = {
        "receipt": folder.receipt,
        "prompt": folder.prompt,
        "request": folder.write("request.json", {"messages": []}),
        "bad": folder.write("bad.json", ["a"]),
    }
    done = folder.verify(given.format(**files), *(each.format(**files) for each in options))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "verdict", "message"),
    [
        ({}, "ok", "the same answer: 2 tokens of 1 choices"),
        ({"answer": [4, 6]}, "wrong", "another answer to prompt 0"),
        ({"prompt": [1, 2, 4]}, "wrong", "prompt 0 of the request is not that of the receipt"),
        ({"seed": 8}, "wrong", "seed of the request differs: 8, in the receipt 7"),
        ({"temperature": 0.5}, "wrong", "temperature of the request differs"),
        ({"weights": "digest-2"}, "open", "this cluster has weights digest-2, not digest-1"),
        ({"numerics": "exact/cpu-avx2"}, "open", "this cluster has numerics exact/cpu-avx2"),
    ],
)
def test_comparison_with_a_replay(change: dict[str, Any], verdict: str, message: str) -> None:
    found = replay_finding(receipt(), receipt(**change))
    assert found.verdict == verdict
    assert message in found.text


def test_what_proves_nothing_is_open(folder: Folder) -> None:
    (one,) = receipt().prompts
    pictured = receipt(prompts=(structs.replace(one, num_images=1),))
    given = jws_of(pictured), "--salt", RECEIPT_SALT.text, "--prompt", folder.prompt
    done = folder.verify(*given)
    assert (done.returncode, "it has images, which --replay checks" in done.stdout) == (3, True)
    cut, fast = receipt(outcome="client_gone"), f"fast{NUMERICS.removeprefix('exact')}"
    assert "the answer was cut: client_gone" in replay_finding(cut, receipt()).text
    other = receipt(numerics=fast, answer=[9, 9])
    found = replay_finding(receipt(numerics=fast), other)
    assert (found.verdict, "fast mode" in found.text) == ("open", True)
    assert replay_finding(receipt(numerics=fast), receipt(numerics=fast)).verdict == "ok"
    unknown = replay_finding(receipt(numerics=""), receipt())
    assert (unknown.verdict, "unknown" in unknown.text) == ("open", True)
