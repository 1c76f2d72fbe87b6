"""A client of a gateway: records its responses, and detects forbidden ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.gateway.streams.receiver import StreamEnd
from shared import block_hash
from shared.errors import HearthError
from shared.messages import Choice, Finish, Request, Served, TokenLogprobs
from shared.packing import pack_hashes, pack_token_ids
from shared.telemetry.timeline import Move
from shared.tenancy.tenant import TenantRecord
from tests.simulation.plan import RequestPlan
from tests.support.world.workers import BLOCK_SIZE

REVISION = "r1"


@dataclass
class ReceivedChoice:
    """The received output of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_stopped: bool = False
    finish: Finish | None = None
    served: list[Served] = field(default_factory=list)
    # variant of the worker's device, by the position of its first token
    variants: dict[int, int] = field(default_factory=dict)


class Client:
    """A `stream.Receiver`."""

    def __init__(self, plan: RequestPlan) -> None:
        self.plan = plan
        self.gateway_id = ""
        self.block_size = BLOCK_SIZE  # of its request's hashes
        self.choices = [ReceivedChoice() for _ in range(plan.num_choices)]
        # with the variant of the device that computed them
        self.prompt_logprobs: list[tuple[int, tuple[TokenLogprobs, ...]]] = []
        self.was_sent = False
        self.sent_at = 0.0
        self.opened_at: float | None = None  # accepted
        self.rejection: HearthError | None = None  # by the gateway
        self.end: StreamEnd | None = None
        self.ended_at = 0.0
        self._served_by = 0  # variant of the last worker that began a choice
        self.variants: list[int] = []  # of the workers that sent tokens, without repetitions
        self.left = False
        self.lost_gateway = False  # the gateway died
        self.wrongs: list[str] = []
        self.on_ended: Callable[[Client], None] = lambda client: None

    @property
    def is_open(self) -> bool:
        """True also while the request waits for Redis to be admitted."""
        has_answer = self.end is not None or self.rejection is not None
        return self.was_sent and not has_answer and not self.lost_gateway

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        output = self.choices[choice_index]
        if output.is_stopped or output.finish is not None or self.end is not None:
            self.wrongs.append(f"choice {choice_index}: tokens after its end")
        if token_ids and output.served:
            self._record_variant(variant_of(output.served[-1]))
        num_wanted = self._num_wanted(token_ids)
        output.token_ids += token_ids[:num_wanted]
        output.logprobs += logprobs[:num_wanted]
        output.is_stopped = num_wanted > 0 and self._stops(token_ids[num_wanted - 1])
        return not output.is_stopped

    def on_served(self, choice_index: int, served: Served) -> None:
        output = self.choices[choice_index]
        output.served.append(served)
        self._served_by = output.variants[len(output.token_ids)] = variant_of(served)

    def on_moved(self, move: Move) -> None:
        if move.pause_s < 0 or not move.from_workers:
            self.wrongs.append(f"not a move: {move}")

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self.prompt_logprobs.append((self._served_by, tuple(logprobs)))

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        output = self.choices[choice_index]
        if output.finish is not None or self.end is not None:
            self.wrongs.append(f"choice {choice_index}: a second ending")
        output.finish = finish

    def on_end(self, end: StreamEnd) -> None:
        if self.end is not None:
            self.wrongs.append("a second end of the request")
        self.end = end
        self.ended_at = asyncio.get_running_loop().time()
        unfinished = [each for each in self.choices if not each.is_stopped and each.finish is None]
        if end.error is None and unfinished:
            self.wrongs.append("ended well, but a choice has no ending")
        self.on_ended(self)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.choices)

    @property
    def num_pushed_tokens(self) -> int:
        return sum(served.num_pushed_tokens for each in self.choices for served in each.served)

    def request(self, tenant: TenantRecord, gateway_id: str) -> Request:
        plan, tenant_id = self.plan, tenant.tenant_id
        root = block_hash.root_hash(tenant_id, REVISION)
        return Request(
            request_id=plan.request_id,
            tenant_id=tenant_id,
            gateway_id=gateway_id,
            model=plan.model,
            revision=REVISION,
            cache_root=root,
            prompt_token_ids=pack_token_ids(plan.prompt),
            block_hashes=pack_hashes(block_hash.extend_chain(root, plan.prompt, self.block_size)),
            sampling=plan.sampling,
            choices=tuple(Choice(choice_index=index) for index in range(plan.num_choices)),
            deadline_s=plan.deadline_s,
            pooling=plan.pooling,
            block_size=self.block_size,
            needs=plan.needs,
            allowed_regions=plan.regions or tenant.allowed_regions or (),
            region_class=tenant.region_class,
            is_zero_retention=tenant.is_zero_retention,
        )

    def _record_variant(self, variant: int) -> None:
        if self.variants[-1:] != [variant]:
            self.variants.append(variant)

    def _num_wanted(self, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            if self._stops(token_id):
                return index + 1
        return len(token_ids)

    def _stops(self, token_id: int) -> bool:
        return self.plan.stop_modulus > 0 and token_id % self.plan.stop_modulus == 0


def variant_of(served: Served) -> int:
    """The variant of the timing executor that its numerics name."""
    assert served.numerics is not None
    return int(served.numerics.device.partition("-")[2] or 0)
