"""Decodes request bodies: strict types, and an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from services.gateway.schemas.integral_numbers import place_of_integer, write_integers
from shared.errors import InvalidRequest, PayloadTooLarge

MAX_REPAIRS = 4  # objects and arrays of one body: each takes another pass
MAX_NEUTRAL_BYTES = 256  # bytes of a neutral value, with the spaces that a client writes
MAX_NAMED_BYTES = 256 * 1024  # of a larger body, unknown fields are not looked for
MAX_WARNINGS = 8
MAX_NAME_CHARS = 64
MAX_TYPO_CHARS = 4
IGNORED = "hearth_ignored"  # the field that a body with unknown fields gets: their names

# Fields of other servers that change an answer, or what is returned of it, with the values that
# change nothing. No dialect supports them; each adds its own.
FOREIGN_FIELDS: dict[str, tuple[Any, ...]] = {
    # OpenAI, and of chat templates
    "add_generation_prompt": (None, True),
    "audio": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    # OpenRouter; OpenAI's Responses. Here it is `reasoning_effort`
    "reasoning": (None, {}),
    # vLLM
    "allowed_token_ids": (None,),
    "early_stopping": (None, False),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "logprob_token_ids": (None,),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "repetition_detection": (None,),
    "return_prompt_text": (None, False),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "structural_tag": (None,),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "watermarking": (None, False),
    # SGLang
    "custom_logit_processor": (None,),
    "input_ids": (None,),
    "lora_path": (None,),
    "no_stop_trim": (None, False),
    "return_hidden_states": (None, False),
    "return_meta_info": (None, False),
    "return_prompt_token_ids": (None, False),
    "return_routed_experts": (None, False),
    "separate_reasoning": (None, True),
    "session_params": (None, {}),
    "stop_regex": (None, [], ""),
    "task": (None,),
    # Text Generation Inference
    "adapter_id": (None,),
    "decoder_input_details": (None, False),
    "details": (None, False),
    "do_sample": (None, True),
    "guideline": (None,),
    "inputs": (None,),
    "max_new_tokens": (None,),
    "parameters": (None, {}),
    "return_full_text": (None, False),
    "tool_prompt": (None,),
    "top_n_tokens": (None, 0),
    "truncate": (None,),
    "typical_p": (None, 1),
    "watermark": (None, False),
    # llama.cpp and Ollama
    "dry_multiplier": (None, 0),
    "dynatemp_range": (None, 0),
    "format": (None, ""),
    "grammar": (None, ""),
    "mirostat": (None, 0),
    "n_predict": (None, -1),
    "n_probs": (None, 0),
    "num_predict": (None,),
    "repeat_penalty": (None, 1),
    "samplers": (None,),
    "tfs_z": (None, 1),
    "think": (None,),
    # Qwen, SiliconFlow, DeepSeek, GLM. Here they are `chat_template_kwargs` or `reasoning_effort`
    "enable_thinking": (None,),
    "thinking": (None,),
    "xtc_probability": (None, 0),
}

# Fields of other servers that change no answer here: for the provider's logs and business, for
# caches and transfers, of media, of other fields that are refused. Ignored without a word.
HARMLESS_FIELDS = frozenset(
    {
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_prompt", "custom_params"),
        *("data_parallel_rank", "disagg_prefill_dp_rank", "ec_transfer_params", "extra_key"),
        *("guided_decoding_backend", "id_slot", "images_config", "keep_alive"),
        *("kv_transfer_params", "max_dynamic_patch", "media_io_kwargs", "metadata"),
        *("min_dynamic_patch", "mm_processor_kwargs", "moderation", "ngram_corpus_id"),
        *("prediction", "prompt_cache_retention", "request_id", "return_cached_tokens_details"),
        *("return_mm_kwargs", "return_token_offsets", "rid", "routed_dp_rank"),
        *("routed_experts_prompt_start", "routed_experts_start_len", "safety_identifier"),
        *("service_tier", "session_id", "store", "stream_interval", "stream_reasoning"),
        *("truncation_side", "use_audio_in_video", "user"),
    }
)
IMAGES = frozenset({"image", "image_b64", "images"})

# msgspec appends the path to a message that may repeat text of the client.
_AT = " - at "
_PATH = re.compile(r"(?:`key` in )?`\$\.?(?P<path>[^`]*?)(?:\[\.\.\.\])?`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")


class SupportedFields:
    """Decodes `struct`; rejects by name a field of `neutral_values` with any other value. Other
    fields than these and the `harmless` ones are ignored, which `warnings` says. `leave_out`
    removes from the values of a body that cannot be decoded what the dialect does not know, and
    returns whether there was any.
    """

    def __init__(
        self,
        struct: type[Any],
        neutral_values: Mapping[str, tuple[Any, ...]],
        harmless: frozenset[str] = HARMLESS_FIELDS,
        *,
        leave_out: Callable[[Any], bool] | None = None,
    ) -> None:
        self._neutral_values = neutral_values
        self._leave_out = leave_out
        self._decoder = msgspec.json.Decoder(struct)
        names = [each.encode_name for each in msgspec.structs.fields(struct)]
        self._names = tuple(each for each in names if not each.startswith("hearth_"))
        self._known = {*names, *neutral_values, *harmless, IGNORED}
        self._with_ignored = msgspec.defstruct(
            struct.__name__,
            [(IGNORED, tuple[str, ...])],
            bases=(struct,),
            kw_only=True,
            frozen=True,
        )
        # Decode the same bytes again and skip the content of all fields: only a value that is short
        # enough to be a neutral one is read. The second skips the names of other fields, too, which
        # a large body may have many of.
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        optional = [(name, msgspec.Raw, msgspec.UNSET) for name in neutral_values]
        self._others = msgspec.json.Decoder(msgspec.defstruct("Others", optional))

    def decode(self, data: bytes | msgspec.Raw) -> Any:
        """Returns the struct. Raises InvalidRequest, with `param` set if one field is invalid."""
        try:
            body = self._decoded(data)
            given = self._given(data)
        except msgspec.ValidationError as error:
            raise _invalid_field(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from error
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        for name, raw in given.items():
            neutral = self._neutral_values.get(name)
            if neutral is not None and not _is_one_of(raw, neutral):
                raise InvalidRequest(_unsupported(name, neutral), param=name)
        ignored = tuple(self._ignored(given))
        return self._noting(body, ignored) if ignored else body

    def warnings(self, body: Any) -> tuple[str, ...]:
        """Returns a warning for each field that `decode` has ignored, at most MAX_WARNINGS."""
        return tuple(self._warning(name) for name in getattr(body, IGNORED, ()))

    def _given(self, data: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
        if len(memoryview(data)) <= MAX_NAMED_BYTES:
            return self._fields.decode(data)
        others = self._others.decode(data)
        pairs = ((name, getattr(others, name)) for name in self._neutral_values)
        return {name: raw for name, raw in pairs if raw is not msgspec.UNSET}

    def _ignored(self, given: Mapping[str, msgspec.Raw]) -> Iterator[str]:
        """Yields the names of the first unknown fields, or those that a preparation process found
        in the body.
        """
        if IGNORED in given:
            yield from _names(given[IGNORED])
        unknown = [
            name
            for name, raw in given.items()
            if name not in self._known and not _is_one_of(raw, (None,))
        ]
        yield from (name[:MAX_NAME_CHARS] for name in unknown[:MAX_WARNINGS])

    def _noting(self, body: Any, ignored: tuple[str, ...]) -> Any:
        fields = {name: getattr(body, name) for name in body.__struct_fields__}
        return self._with_ignored(**fields, **{IGNORED: ignored})

    def _warning(self, name: str) -> str:
        alike = [  # few: to compare with all names takes 2 ms
            each
            for each in self._names
            if each[:1] == name[:1] and abs(len(each) - len(name)) < MAX_TYPO_CHARS
        ]
        close = get_close_matches(name, alike, n=1, cutoff=0.8)
        end = f": did you mean {close[0]}?" if close else ""
        return f"{name} is unknown here and was ignored{end}"

    def _decoded(self, data: bytes | msgspec.Raw) -> Any:
        """Returns the struct. Raises DecodeError, UnicodeDecodeError and RecursionError."""
        body: Any = msgspec.UNSET
        leave_out = self._leave_out
        for _ in range(MAX_REPAIRS):
            try:
                return self._decoder.decode(data)
            except msgspec.ValidationError as error:
                place = place_of_integer(str(error))
                if not place and leave_out is None:
                    raise
                if body is msgspec.UNSET:
                    body = msgspec.json.decode(data)
                if not (place and write_integers(body, place)):
                    if leave_out is None or not leave_out(body):
                        raise
                    leave_out = None
                data = msgspec.json.encode(body)
        return self._decoder.decode(data)


def check_count(param: str, count: int, limit: int) -> None:
    """Raises PayloadTooLarge for more items than allowed."""
    if count > limit:
        raise PayloadTooLarge(f"{param}: {count} are more than the limit of {limit}", param=param)


def _names(raw: msgspec.Raw) -> list[str]:
    """Returns no names for what is no list of names: a client has written the field."""
    try:
        names = msgspec.json.decode(raw, type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return [name[:MAX_NAME_CHARS] for name in names[:MAX_WARNINGS]]


def _unsupported(name: str, neutral: tuple[Any, ...]) -> str:
    if name in IMAGES:
        return f"{name}: send images as parts of messages"
    values = [each for each in neutral if each is not None and each not in ([], {}, "")]
    if not values:
        return f"{name} is not supported"
    return f"{name} is not supported, except as {msgspec.json.encode(values[0]).decode()}"


def _is_one_of(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    """Compares booleans and numbers as different values: False is not 0."""
    if len(memoryview(raw)) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


def _invalid_field(message: str) -> InvalidRequest:
    head, _, end = message.rpartition(_AT)
    place = _PATH.fullmatch(end)
    text, path = (message, "") if place is None else (head, place["path"])
    missing = _MISSING.fullmatch(text)
    if missing is not None:
        path = f"{path}.{missing['name']}" if path else missing["name"]
    return InvalidRequest(f"{path}: {text}" if path else text, param=path or None)
