"""Builds the wire `Request` from a validated and tokenized request: hashes its blocks, fixes a
seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.models.served_text import ServedModel, ServedText
from services.gateway.request.generation_request import (
    GenerationRequest,
    RequestContext,
    build_request,
    check_min_tokens,
    check_payload,
    cut_warning,
    max_output_tokens,
)
from services.gateway.request.prompt import (
    ChatPrompt,
    Echo,
    PackedPrompt,
    TokenPrompt,
    echo_of,
    token_ids_of,
)
from services.gateway.structured.grammars.grammar_request import CheckedPlan
from services.gateway.structured.grammars.thinking import (
    TAIL_TOKENS,
    budget_of,
    opens_reasoning,
    spec_of,
    thinking_at_end,
)
from services.gateway.structured.tools.families import PLAIN
from services.gateway.structured.tools.parsing.output_assembler import OutputAssembler
from services.gateway.text.decoding.detokenizer import Detokenizer
from services.gateway.text.model_files import GenerationDefaults
from services.gateway.text.stop_strings import StopAutomaton
from shared.config import GatewayConfig
from shared.errors import InvalidRequest
from shared.grammar.spec import GrammarSpec
from shared.grammar.thinking import ThinkingBudget
from shared.messages import Request
from shared.output.packed_logprobs import MAX_LOGPROB_BYTES, packed_bytes
from shared.randomness import Randomness
from shared.secrets.root_key import root_key_of
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes
from shared.tenancy.tenant import TenantRecord

CONTEXT_TOKENS = 8  # last prompt tokens that the detokenizer needs to continue the text


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    model: ServedModel
    generation: GenerationRequest
    request: Request
    prompt_token_ids: list[int]
    echo: Echo | None
    stop: StopAutomaton
    warnings: tuple[str, ...] = ()  # for the client

    @property
    def max_output_tokens(self) -> int:
        """Tokens that the client may see, summed over all choices."""
        if not self.generation.shows_output:
            return 0
        return len(self.request.choices) * self.request.sampling.max_tokens


def check_logprobs(prepared: Sequence[PreparedRequest]) -> None:
    """Checks the logprobs of all prompts of one response together, as the gateway and the workers
    retain them: choices × tokens × (1 + k). Raises InvalidRequest.
    """
    num_bytes = sum(
        packed_bytes(each.request.sampling, len(each.request.choices)) for each in prepared
    )
    if num_bytes > MAX_LOGPROB_BYTES:
        param = prepared[0].generation.logprobs_param
        raise InvalidRequest(
            f"{param}: the logprobs of this request may take {num_bytes} bytes, the limit is "
            f"{MAX_LOGPROB_BYTES}: request fewer choices, tokens or logprobs",
            param=param,
        )


class RequestBuilder:
    """Builds requests without I/O; only the seed is random. `build` may run on a thread."""

    def __init__(self, config: GatewayConfig, randomness: Randomness) -> None:
        self._config = config
        self._root_key = root_key_of(config.secret("cluster_secret"))
        self.public = PublicPrefixes(self._root_key)
        self._randomness = randomness

    def build(
        self,
        generation: GenerationRequest,
        model: ServedModel,
        *,
        tenant: TenantRecord,
        request_id: str,
        max_payload_bytes: int,
        checked: CheckedPlan | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> PreparedRequest:
        """Builds the request of a prompt that has its tokens. `bad_words`: the tokens of the
        request's bad words. Raises the InvalidRequest that rejects the request.
        """
        card, text, given = model.card, model.text, generation.prompt
        assert isinstance(given, TokenPrompt | PackedPrompt), "it is tokenized before"
        prompt = token_ids_of(given, card)
        default = self._default_max_tokens(generation, tenant, text.files.defaults)
        max_tokens = max_output_tokens(generation, len(prompt), card, default)
        origin = RequestContext(
            request_id=request_id,
            tenant=tenant,
            gateway_id=self._config.process_id,
            timeout_s=self._timeout_s(generation),
            root_key=self._root_key(),
        )
        seed = int.from_bytes(self._randomness.bytes(8), "little")
        sampling = generation.sampling.resolve(
            max_tokens=max_tokens,
            num_logprobs=generation.num_logprobs,
            num_prompt_logprobs=generation.num_prompt_logprobs,
            default_seed=seed,
            card=card,
            files=text.files,
            bad_words=bad_words,
            grammar=None if checked is None else _grammar(generation, checked, prompt, text),
            thinking=_thinking_budget(generation, prompt, text),
        )
        request = build_request(generation, prompt, sampling, card, origin, self.public)
        check_payload(request, generation.prompt.param, max_payload_bytes)
        echo = echo_of(given, text.files.tokens) if generation.has_echo else None
        stop = StopAutomaton(generation.sampling.stop_strings)
        warnings = (*generation.warnings, *cut_warning(generation, max_tokens, card))
        warnings += () if checked is None else checked.warnings
        prepared = PreparedRequest(model, generation, request, prompt, echo, stop, warnings)
        check_logprobs((prepared,))
        return prepared

    def _timeout_s(self, generation: GenerationRequest) -> float:
        longest = self._config.request_timeout_s
        return longest if generation.timeout_s is None else min(generation.timeout_s, longest)

    def _default_max_tokens(
        self, generation: GenerationRequest, tenant: TenantRecord, defaults: GenerationDefaults
    ) -> int:
        """Returns the default, capped at the tenant's limit, so that the default alone rejects no
        request.
        """
        default = generation.default_max_tokens
        if default is None:
            of_model = defaults.max_new_tokens
            default = self._config.default_max_tokens if of_model is None else of_model
        if tenant.output_tokens_per_min is None:
            return default
        return max(1, min(default, tenant.output_tokens_per_min // generation.num_choices))


def check_min_tokens_of(
    generation: GenerationRequest, tenant: TenantRecord, model: ServedModel
) -> None:
    """Raises PromptTooLong or ExceedsLimit for a prompt that cannot fit by its characters alone."""
    check_min_tokens(
        generation.prompt,
        model.text.files.longest_token_chars,
        max_context_tokens=model.card.max_context_tokens,
        max_input_tokens=tenant.input_tokens_per_min,
    )


def assembler_of(prepared: PreparedRequest, choice_index: int = 0) -> OutputAssembler:
    """Returns an assembler that splits off calls and reasoning, if the response can have them."""
    context = prepared.prompt_token_ids if prepared.generation.continues_text else []
    text = prepared.model.text
    tokens = text.files.tokens
    num_partial = tokens.token_bytes.num_partial(context)
    detokenizer = Detokenizer(tokens, context[-CONTEXT_TOKENS:], num_partial=num_partial)
    min_tokens = prepared.request.sampling.min_tokens
    generation = prepared.generation
    if generation.continues_text or not text.parsing.applies(generation.tools):
        return OutputAssembler(detokenizer, prepared.stop, min_tokens=min_tokens)
    prompt, tail = generation.prompt, _tail(prepared.prompt_token_ids, text)
    thinking = thinking_at_end(tail, text.family)
    parser = text.parsing.parser(
        generation.tools,
        choice_index,
        request_id=prepared.request.request_id,
        prompt_tail=tail,
        num_earlier_calls=prompt.num_calls if isinstance(prompt, ChatPrompt | PackedPrompt) else 0,
        is_constrained=generation.constrains_text,
        opens_reasoning=not generation.constrains_text
        or opens_reasoning(thinking, text.family, tokens.added_token_id),
    )
    return OutputAssembler(
        detokenizer,
        prepared.stop,
        parser,
        text.parsing.markers,
        min_tokens=min_tokens,
        shows_reasoning=generation.reasoning.is_shown,
    )


def _grammar(
    generation: GenerationRequest, checked: CheckedPlan, prompt: Sequence[int], text: ServedText
) -> GrammarSpec:
    family = PLAIN if generation.continues_text else text.family
    thinking = thinking_at_end(_tail(prompt, text), family)
    return spec_of(checked.plan, thinking, family, text.files.tokens.added_token_id)


def _thinking_budget(
    generation: GenerationRequest, prompt: Sequence[int], text: ServedText
) -> ThinkingBudget | None:
    """Returns the budget, or None. Raises InvalidRequest for a model that does not mark the end of
    its reasoning.
    """
    max_tokens, param = generation.reasoning.max_tokens, generation.reasoning.max_tokens_param
    if max_tokens is None:
        return None
    family = PLAIN if generation.continues_text else text.family
    thinking = thinking_at_end(_tail(prompt, text), family)
    budget = budget_of(max_tokens, thinking, family, text.spellings)
    if budget is None and param is not None:
        raise InvalidRequest(f"{param}: this model does not mark its reasoning", param=param)
    return budget


def _tail(prompt: Sequence[int], text: ServedText) -> str:
    return text.files.tokens.decode(prompt[-TAIL_TOKENS:])
