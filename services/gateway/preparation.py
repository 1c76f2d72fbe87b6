"""From a validated request to what goes on the wire: render, tokenize, hash, fix a seed."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.generation import (
    Generation,
    Origin,
    build_request,
    check_payload,
    max_output_tokens,
    tokenize,
)
from services.gateway.text.assembler import TextAssembler
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.model_files import ModelFiles
from shared.config import GatewayConfig
from shared.messages import ModelCard, Request
from shared.randomness import Randomness


@dataclass(frozen=True, slots=True)
class Prepared:
    request: Request
    num_prompt_tokens: int
    stop: tuple[str, ...]


class Preparation:
    """Pure but for the seed; may run on a thread, as tokenizing lets others run meanwhile."""

    def __init__(self, config: GatewayConfig, files: ModelFiles, randomness: Randomness) -> None:
        self._config = config
        self._files = files
        self._randomness = randomness

    def prepare(
        self,
        generation: Generation,
        card: ModelCard,
        *,
        tenant_id: str,
        request_id: str,
        max_payload_bytes: int,
    ) -> Prepared:
        """Raises the InvalidRequest with which the request is refused."""
        prompt = tokenize(generation, self._files)
        default = self._config.default_max_tokens
        max_tokens = max_output_tokens(generation, len(prompt), card, default)
        check_payload(len(prompt), max_tokens, card, max_payload_bytes)
        origin = Origin(
            request_id=request_id,
            tenant_id=tenant_id,
            gateway_id=self._config.process_id,
            timeout_s=self._config.request_timeout_s,
            drawn_seed=int.from_bytes(self._randomness.bytes(8), "little"),
        )
        defaults = self._files.defaults
        request = build_request(generation, prompt, max_tokens, card, defaults, origin)
        return Prepared(request, len(prompt), generation.stop)

    def assembler(self, prepared: Prepared) -> TextAssembler:
        detokenizer = Detokenizer(self._files.tokenizer.tokenizer)
        min_tokens = prepared.request.sampling.min_tokens
        return TextAssembler(detokenizer, prepared.stop, min_tokens=min_tokens)
