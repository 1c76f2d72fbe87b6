"""What a receipt says of prompts that ended in every way."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.receipts.draft import ChoiceEnd, ReceiptDraft
from services.gateway.receipts.places import Places
from services.gateway.streams.receiver import StreamEnd
from services.gateway.streams.try_record import TryRecord
from shared.messages import Choice, ImagePart, Placed, Request, SamplingParams, Served
from shared.packing import pack_token_ids
from shared.receipts.receipt import AnswerReceipt, ServedWeights
from shared.receipts.salted import SALT_BYTES, ReceiptSalt
from shared.tenancy.tenant import TenantRecord

SALT = ReceiptSalt(b"s" * SALT_BYTES)
SERVED = Served(num_cached_tokens=0, prefill_worker_id=None)


@dataclass
class Ended:
    """An `EndedPrompt`."""

    end: StreamEnd | None
    choice_ends: list[ChoiceEnd]
    embedding: bytes | None = None
    outcome: str = "stop"


def attempt(worker_id: str | None, *, at: float = 0.0, num_tokens: int = 0) -> TryRecord:
    found = TryRecord(1, at)
    if worker_id is not None:
        placed = Placed(request_id="r", placement_id=bytes(16), worker_id=worker_id)
        found.record_placed(placed, at + 1)
        if num_tokens:
            found.record_tokens(num_tokens, SERVED, at + 2, is_counted=True)
    found.end("finished", at + 3)
    return found


@dataclass
class Drawn:
    draft: ReceiptDraft = field(
        default_factory=lambda: ReceiptDraft(
            TenantRecord(tenant_id="t", region_class="eu"),
            "chat",
            SALT,
            Places("gateway-1", "", "fr", lambda site: ""),
        )
    )

    def ended(
        self,
        index: int,
        output: Ended,
        prompt: tuple[int, ...] = (1,),
        images: tuple[ImagePart, ...] = (),
    ) -> None:
        request = Request(
            request_id="r",
            tenant_id="t",
            gateway_id="gateway-1",
            model="tiny",
            revision="digest",
            cache_root=bytes(16),
            prompt_token_ids=pack_token_ids(prompt),
            block_hashes=b"",
            sampling=SamplingParams(seed=1, max_tokens=9),
            choices=(Choice(choice_index=0),),
            images=images,
            deadline_s=1.0,
        )
        self.draft.prompt_ended(index, request, (), output)

    def receipt(self) -> AnswerReceipt | None:
        return self.draft.receipt(
            "r",
            ServedWeights(name="tiny", weights="digest"),
            release="1",
            received_at=0.0,
            finished_at=9.0,
            unix_time=lambda at: 100.0 + at,
        )


def end_of(*tries: TryRecord, outputs: tuple[list[int], ...] = ([],)) -> StreamEnd:
    return StreamEnd(None, None, 0, tries, outputs)


def test_tokens_after_a_stop_string_do_not_count() -> None:
    drawn = Drawn()
    end = end_of(attempt("decode-1", num_tokens=4), outputs=([4, 5, 6, 7],))
    drawn.ended(0, Ended(end, [ChoiceEnd(2, "stop")]))
    found = drawn.receipt()
    assert found is not None
    (choice,) = found.prompts[0].choices
    assert (choice.num_tokens, choice.outcome) == (2, "stop")
    assert choice.tokens == SALT.output(0, 0, pack_token_ids([4, 5]))
    assert found.prompts[0].tries[0].num_tokens == 4, "they arrived"
    assert (found.region_class, found.gateway.region) == ("eu", "fr")


def test_prompts_are_in_the_order_of_the_request() -> None:
    drawn = Drawn()
    for index, at in ((2, 5.0), (0, 3.0), (1, 4.0)):
        end = end_of(attempt("decode-1", at=at, num_tokens=1), outputs=([index],))
        drawn.ended(index, Ended(end, [ChoiceEnd(1, "length")]), prompt=(index,))
    found = drawn.receipt()
    assert found is not None
    prompts = [SALT.prompt(index, pack_token_ids([index])) for index in range(3)]
    assert [each.prompt for each in found.prompts] == prompts
    times = found.received_at, found.first_token_at, found.finished_at
    assert times == (100.0, 105.0, 109.0)


def test_lost_and_cut_answers_name_the_workers_that_had_them() -> None:
    drawn = Drawn()
    tries = (attempt("decode-1"), attempt(None), attempt("decode-2", num_tokens=1))
    cut = Ended(end_of(*tries, outputs=([4],)), [ChoiceEnd(1, "")], outcome="client_gone")
    drawn.ended(0, cut)
    found = drawn.receipt()
    assert found is not None
    assert [each.decode.id for each in found.prompts[0].tries] == ["decode-1", "decode-2"]
    assert found.prompts[0].choices[0].outcome == "client_gone"


def test_embedding_is_hashed_by_its_bytes() -> None:
    drawn = Drawn()
    drawn.ended(0, Ended(end_of(attempt("d", num_tokens=1)), [ChoiceEnd(0, "stop")], b"vector"))
    found = drawn.receipt()
    assert found is not None
    assert found.prompts[0].choices[0].tokens == SALT.output(0, 0, b"vector")


def test_images_are_part_of_the_prompt() -> None:
    drawn = Drawn()
    image = ImagePart(first_token=0, num_tokens=1, image_hash=b"i" * 16, grid=(0, 0))
    end = end_of(attempt("decode-1", num_tokens=1), outputs=([4],))
    drawn.ended(0, Ended(end, [ChoiceEnd(1, "stop")]), images=(image,))
    found = drawn.receipt()
    assert found is not None
    assert found.prompts[0].num_images == 1
    assert found.prompts[0].prompt == SALT.prompt(0, pack_token_ids([1]), (image,))
    assert found.prompts[0].prompt != SALT.prompt(0, pack_token_ids([1]))


def test_prompt_that_no_worker_has_seen_has_no_receipt() -> None:
    drawn = Drawn()
    drawn.ended(0, Ended(end_of(attempt(None)), [ChoiceEnd(0, "")]))
    drawn.ended(1, Ended(None, [ChoiceEnd(0, "")]))
    assert drawn.receipt() is None
