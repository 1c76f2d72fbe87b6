"""A generation request, independent of HTTP dialects, and its conversion to a wire `Request`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from services.gateway.request.conversation import ReasoningOptions
from services.gateway.request.prompt import ChatPrompt, PackedPrompt, Prompt, min_tokens
from services.gateway.request.sampling import SamplingFields
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.tools.tool import ToolOptions
from services.gateway.tenancy.errors import ExceedsLimit
from services.gateway.tenancy.permissions import priority_of
from services.gateway.text.checkpoint.sentence_modules import SentenceModules, model_pooling
from shared.block_hash import image_extras, root_hash
from shared.errors import InvalidRequest, PromptTooLong
from shared.grammar.spec import GRAMMAR_FEATURE
from shared.grammar.thinking import THINKING_FEATURE
from shared.messages import Choice, ImagePart, ModelCard, Pooling, Request, SamplingParams
from shared.packing import TOKEN_ID_BYTES, pack_hashes, pack_token_ids
from shared.pixels.pixel_frames import IMAGES_FEATURE
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes
from shared.tenancy.tenant import TenantRecord

# Bytes of a message besides tokens, hashes and sampling: ids, the scheduler's additions.
ENVELOPE_BYTES = 16 * 1024
LOGPROB_BYTES = 14  # a token id and a float in msgpack


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its options. `pooling`: requests an embedding instead of tokens."""

    model: str
    prompt: Prompt
    sampling: SamplingFields
    max_tokens: int | None = None  # None: `default_max_tokens`, less where the context ends
    default_max_tokens: int | None = None  # None: the model's default
    asked_max_tokens: int | None = None  # the limit of a client whose limit is a default here
    max_tokens_param: str = "max_tokens"  # the request field that holds the number
    num_logprobs: int | None = None  # None: none; k: of the sampled token and of the top k
    num_prompt_logprobs: int | None = None
    logprobs_param: str = "logprobs"  # the request field that holds the number
    num_choices: int = 1
    cache_salt: str = ""
    affinity_key: str = ""  # session key: prefer the worker of the session's last request
    pooling: Pooling | None = None
    dimensions: int | None = None  # an embedding's size; None: the hidden size
    has_echo: bool = False
    shows_output: bool = True  # False: sampled tokens are not returned
    priority: int | None = None  # None: the tenant's priority
    timeout_s: float | None = None  # shortens that of the gateway
    output: OutputConstraint | None = None
    tools: ToolOptions | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    needs: tuple[str, ...] = ()  # features that its workers must have, such as `grammar/1`
    is_queueable: bool = True  # False: rejected if it would wait for a worker
    warnings: tuple[str, ...] = ()  # for the client, about the body

    @property
    def continues_text(self) -> bool:
        """Whether the output continues the prompt's text; a chat response starts a new text."""
        prompt = self.prompt
        is_chat = (
            prompt.is_chat if isinstance(prompt, PackedPrompt) else isinstance(prompt, ChatPrompt)
        )
        return not is_chat

    @property
    def constrains_text(self) -> bool:
        """Whether a grammar applies to the output's text; it does not if a call is required."""
        return self.output is not None and (self.tools is None or not self.tools.is_forced)


def check_constrained(generation: GenerationRequest) -> None:
    """Raises InvalidRequest for options that contradict a required form of the output."""
    tools, sampling = generation.tools, generation.sampling
    if tools is not None and tools.choice != "none" and sampling.ignore_eos:
        raise InvalidRequest("ignore_eos and tools exclude each other", param="ignore_eos")
    if generation.output is not None:
        demand = generation.output.param
    elif tools is not None and tools.is_forced:
        demand = "tool_choice"
    else:
        return
    for param, is_given in (
        ("ignore_eos", bool(sampling.ignore_eos)),
        ("min_tokens", bool(sampling.min_tokens)),
        ("echo", generation.has_echo),
    ):
        if is_given:
            raise InvalidRequest(f"{param} and {demand} exclude each other", param=param)


def with_model_pooling(
    generations: Sequence[GenerationRequest], modules: SentenceModules | None
) -> Sequence[GenerationRequest]:
    """Returns requests for embeddings, whose pooling the client did not choose, with that of the
    model. Raises InvalidRequest for a model whose vectors are not served.
    """
    pooling = model_pooling(modules)
    if pooling is None:
        return generations
    return [msgspec.structs.replace(each, pooling=pooling) for each in generations]


def check_dimensions(generation: GenerationRequest, hidden_size: int | None) -> None:
    """Raises InvalidRequest if the model's embeddings have another size."""
    if generation.dimensions not in (None, hidden_size):
        only = "left out" if hidden_size is None else f"{hidden_size} or left out"
        raise InvalidRequest(f"dimensions: must be {only} for this model", param="dimensions")


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The tenant, gateway and timeout of a request."""

    request_id: str
    tenant: TenantRecord
    gateway_id: str
    timeout_s: float
    root_key: bytes = b""  # for hash chains, see `block_hash.root_key`


def max_output_tokens(
    generation: GenerationRequest, num_prompt_tokens: int, card: ModelCard, default: int
) -> int:
    """Returns the requested tokens, at most the room that the prompt leaves in the context. Raises
    PromptTooLong.
    """
    context = card.max_context_tokens
    room = context - num_prompt_tokens
    if not generation.shows_output:  # a discarded token takes no room in the context
        room += 1
    if room < 1:
        more = ", and an answer has at least one" if generation.shows_output else ""
        raise prompt_too_long(generation.prompt.param, f"{num_prompt_tokens} tokens{more}", context)
    wanted = generation.max_tokens
    if wanted is None:
        wanted = max(default, generation.sampling.min_tokens or 0)
    return min(wanted, room)


def cut_warning(generation: GenerationRequest, max_tokens: int, card: ModelCard) -> tuple[str, ...]:
    """Returns a warning if the client requests more tokens than the response may have: clients send
    large limits to every model.
    """
    given = generation.max_tokens
    if given is None:
        given = generation.asked_max_tokens
    if given is None or given <= max_tokens:
        return ()
    context = card.max_context_tokens
    return (
        f"{generation.max_tokens_param}: {given} is cut to {max_tokens} tokens, in this model's "
        f"context of {context} and the limits of this tenant",
    )


def prompt_too_long(param: str, length: str, context: int) -> PromptTooLong:
    """Returns the error with the words by which clients recognise that a conversation must be
    shortened.
    """
    return PromptTooLong(
        f"{param}: This model's maximum context length is {context} tokens, but the prompt has "
        f"{length}",
        param=param,
    )


def check_min_tokens(
    prompt: Prompt,
    longest_token_chars: int | None,
    *,
    max_context_tokens: int | None,
    max_input_tokens: int | None,
) -> None:
    """Rejects a prompt that cannot fit, before it is rendered. None: no limit.

    Raises PromptTooLong, or ExceedsLimit for `max_input_tokens`, a tenant's limit.
    """
    least = min_tokens(prompt, longest_token_chars)
    if max_context_tokens is not None and least > max_context_tokens:
        raise prompt_too_long(prompt.param, f"at least {least} tokens", max_context_tokens)
    if max_input_tokens is not None and least > max_input_tokens:
        raise ExceedsLimit(
            f"{prompt.param}: this request uses at least {least} of input_tokens_per_min, this "
            f"tenant's limit is {max_input_tokens}",
            param=prompt.param,
        )


def check_payload(request: Request, param: str, limit: int) -> None:
    """Checks that the request, with all its output, fits in one bus message of `limit` bytes.

    The prompt logprobs in the reply must fit, too. Raises PromptTooLong.
    """
    sampling = request.sampling
    num_bytes = len(request.prompt_token_ids) + len(request.block_hashes) + ENVELOPE_BYTES
    num_bytes += len(request.choices) * sampling.max_tokens * TOKEN_ID_BYTES
    num_bytes += len(msgspec.msgpack.encode(sampling))
    if sampling.num_prompt_logprobs is not None:
        num_tokens = len(request.prompt_token_ids) // TOKEN_ID_BYTES
        answer_bytes = num_tokens * (1 + sampling.num_prompt_logprobs) * LOGPROB_BYTES
        num_bytes = max(num_bytes, answer_bytes + ENVELOPE_BYTES)
    if num_bytes > limit:
        raise PromptTooLong(
            f"the request takes {num_bytes} bytes as an internal message; the limit is {limit}",
            param=param,
        )


def scoped_affinity_key(tenant_id: str, affinity_key: str) -> str:
    """Hashes the key with the tenant, so that tenants cannot share sessions. "" stays ""."""
    if not affinity_key:
        return ""
    return blake2b(f"{tenant_id}\0{affinity_key}".encode(), digest_size=16).hexdigest()


def build_request(
    generation: GenerationRequest,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    card: ModelCard,
    origin: RequestContext,
    public: PublicPrefixes,
) -> Request:
    tenant, images = origin.tenant, images_of(generation.prompt)
    root = root_hash(
        tenant.tenant_id, card.revision, cache_salt=generation.cache_salt, key=origin.root_key
    )
    extras = image_extras(images, card.block_size)
    is_salted = bool(generation.cache_salt)
    chain = public.chain(root, prompt_token_ids, card, extras, is_salted=is_salted)
    return Request(
        request_id=origin.request_id,
        tenant_id=tenant.tenant_id,
        gateway_id=origin.gateway_id,
        model=card.name,
        revision=card.revision,
        cache_root=chain.cache_root,
        prompt_token_ids=pack_token_ids(prompt_token_ids),
        block_hashes=pack_hashes(chain.hashes),
        num_public_blocks=chain.num_public,
        sampling=sampling,
        choices=tuple(Choice(choice_index=index) for index in range(generation.num_choices)),
        deadline_s=origin.timeout_s,
        priority=priority_of(tenant, generation.priority),
        weight=tenant.weight,
        allowed_regions=tenant.allowed_regions or (),
        region_class=tenant.region_class,
        kv_quota_tokens=tenant.kv_quota_tokens or 0,
        is_zero_retention=tenant.is_zero_retention,
        pooling=generation.pooling,
        block_size=card.block_size,
        public_root=chain.public_root,
        needs=_needs(generation, sampling),
        images=images,
    )


def images_of(prompt: Prompt) -> tuple[ImagePart, ...]:
    return tuple(each.part for each in prompt.images) if isinstance(prompt, PackedPrompt) else ()


def _needs(generation: GenerationRequest, sampling: SamplingParams) -> tuple[str, ...]:
    of_grammar = () if sampling.grammar is None else (GRAMMAR_FEATURE,)
    of_thinking = () if sampling.thinking is None else (THINKING_FEATURE,)
    of_images = (IMAGES_FEATURE,) if images_of(generation.prompt) else ()
    return tuple(dict.fromkeys((*generation.needs, *of_grammar, *of_thinking, *of_images)))
