"""Checks of a receipt that need no cluster. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.cli.verify.finding import Finding, Verdict
from shared.packing import pack_token_ids
from shared.receipts.jws import ParsedJws, PublicJwk, thumbprint
from shared.receipts.receipt import AnswerReceipt, PlacedProcess, payload_hash, receipt_of
from shared.receipts.salted import ReceiptSalt

TokenLists = Sequence[Sequence[int]]


def signature_finding(jws: ParsedJws, keys: Sequence[PublicJwk]) -> Finding:
    """`keys` are those that the reader trusts, each for the receipts of its site: a linked site
    signs for no other. Raises ConfigError for a payload of another form.
    """
    known: dict[str, list[PublicJwk]] = {}
    for each in keys:
        known.setdefault(thumbprint(each.public), []).append(each)
    signing = known.get(jws.kid)
    if signing is None:
        names = ", ".join(known) or "none"
        text = f"of another site or cluster: signed with key {jws.kid}, known: {names}"
        return Finding("signature", "wrong", text)
    named = sorted({each.site for each in signing})
    site = f" of site {' or '.join(map(repr, named))}" if all(named) else ""
    if not jws.is_signed_by(signing[0].public):
        return Finding("signature", "wrong", f"not that of key {jws.kid}{site}: it was changed")
    claimed = receipt_of(jws.payload).gateway.site
    if site and claimed not in ("", *named):  # "": from before the site had a name
        text = f"key {jws.kid}{site}, which is none of site {claimed!r} that it names"
        return Finding("signature", "wrong", text)
    return Finding("signature", "ok", f"key {jws.kid}{site}")


def hash_finding(jws: ParsedJws, given: str) -> Finding:
    """`given` is what the response said of its receipt."""
    found = payload_hash(jws.payload)
    if found != given:
        return Finding("hash", "wrong", f"{found}, the response said {given}")
    return Finding("hash", "ok", found)


def salt_finding(receipt: AnswerReceipt, salt: ReceiptSalt) -> Finding:
    if salt.commitment != receipt.salt:
        return Finding("salt", "wrong", "not the salt of this receipt")
    return Finding("salt", "ok", "the salt of this receipt")


def prompt_finding(receipt: AnswerReceipt, salt: ReceiptSalt, prompts: TokenLists) -> Finding:
    if any(each.num_images for each in receipt.prompts):
        return Finding("prompt", "open", "not compared: it has images, which --replay checks")
    known = [each.prompt for each in receipt.prompts]
    found = [salt.prompt(index, pack_token_ids(each)) for index, each in enumerate(prompts)]
    return _compared("prompt", known, found, sum(map(len, prompts)))


def answer_finding(receipt: AnswerReceipt, salt: ReceiptSalt, answers: TokenLists) -> Finding:
    """`answers` are in the order of the response's choices."""
    places = [(i, c) for i, each in enumerate(receipt.prompts) for c in range(len(each.choices))]
    known = [each.tokens for prompt in receipt.prompts for each in prompt.choices]
    if len(answers) != len(known):
        return Finding("answer", "wrong", f"{len(answers)} lists of tokens, expected {len(known)}")
    found = [
        salt.output(index, choice, pack_token_ids(each))
        for (index, choice), each in zip(places, answers, strict=True)
    ]
    return _compared("answer", known, found, sum(map(len, answers)))


def _compared(check: str, known: list[str], found: list[str], num_tokens: int) -> Finding:
    verdict: Verdict = "ok" if known == found else "wrong"
    text = f"these {num_tokens} tokens" if known == found else "not the tokens of this receipt"
    return Finding(check, verdict, text)


def summary_lines(receipt: AnswerReceipt) -> Iterator[str]:
    """Yields what the receipt says, for its reader."""
    model = receipt.model
    revision = f" {model.revision}" if model.revision else ""
    numerics = ", ".join(numerics_of(receipt)) or "not reported"
    yield f"request    {receipt.request_id} of tenant {receipt.tenant}, release {receipt.release}"
    yield f"model      {model.name}{revision}, weights {model.weights}"
    yield f"numerics   {numerics}"
    for prompt in receipt.prompts[:1]:
        for each in prompt.tries:
            prefill = "" if each.prefill is None else f", prompt computed by {_place(each.prefill)}"
            yield f"decoded by {_place(each.decode)}{prefill}: {each.num_tokens} tokens"
            for hop in each.kv_hops:
                yield f"KV from    {_place(hop.source)}: {hop.num_tokens} tokens"
    if len(receipt.prompts) > 1:
        yield f"           and {len(receipt.prompts) - 1} further prompts (--json shows all)"


def numerics_of(receipt: AnswerReceipt) -> list[str]:
    """Returns the numerics of all workers that made tokens or an embedding, without repetitions. Of
    a worker that was lost before it reported them, "".
    """
    tries = [each for prompt in receipt.prompts for each in prompt.tries]
    made = (each for each in tries if each.num_tokens or each.numerics)
    return list(dict.fromkeys(each.numerics for each in made))


def _place(process: PlacedProcess) -> str:
    parts = (process.site and f"site {process.site}", process.region and f"region {process.region}")
    place = ", ".join(filter(None, parts))
    return f"{process.id} ({place})" if place else process.id
