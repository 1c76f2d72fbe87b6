"""Decodes request bodies: strict types, and an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.schemas.integral_numbers import place_of_integer, write_integers
from shared.errors import InvalidRequest, PayloadTooLarge

MAX_REPAIRS = 4  # objects and arrays of one body: each takes another pass
MAX_NEUTRAL_BYTES = 256  # bytes of a neutral value, with the spaces that a client writes

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

# msgspec appends the path to a message that may repeat text of the client.
_AT = " - at "
_PATH = re.compile(r"(?:`key` in )?`\$\.?(?P<path>[^`]*?)(?:\[\.\.\.\])?`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")


class SupportedFields:
    """Decodes `struct`; rejects by name a field of `neutral_values` with any other value."""

    def __init__(self, struct: type[Any], neutral_values: Mapping[str, tuple[Any, ...]]) -> None:
        self._neutral_values = neutral_values
        self._decoder = msgspec.json.Decoder(struct)
        # Decodes the same bytes again and skips all other fields, and the content of these: only
        # a value that is short enough to be a neutral one is read.
        optional = [(name, msgspec.Raw, msgspec.UNSET) for name in neutral_values]
        self._others = msgspec.json.Decoder(msgspec.defstruct("Others", optional))

    def decode(self, data: bytes | msgspec.Raw) -> Any:
        """Returns the struct. Raises InvalidRequest, with `param` set if one field is invalid."""
        try:
            body = self._decoded(data)
            others = self._others.decode(data)
        except msgspec.ValidationError as error:
            raise _invalid_field(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from error
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        for name, neutral in self._neutral_values.items():
            raw = getattr(others, name)
            if raw is not msgspec.UNSET and not _is_one_of(raw, neutral):
                raise InvalidRequest(f"{name} is not supported with this value", param=name)
        return body

    def _decoded(self, data: bytes | msgspec.Raw) -> Any:
        """Returns the struct. Raises DecodeError, UnicodeDecodeError and RecursionError."""
        body: Any = msgspec.UNSET
        for _ in range(MAX_REPAIRS):
            try:
                return self._decoder.decode(data)
            except msgspec.ValidationError as error:
                place = place_of_integer(str(error))
                if place and body is msgspec.UNSET:
                    body = msgspec.json.decode(data)
                if not place or not write_integers(body, place):
                    raise
                data = msgspec.json.encode(body)
        return self._decoder.decode(data)


def check_count(param: str, count: int, limit: int) -> None:
    """Raises PayloadTooLarge for more items than allowed."""
    if count > limit:
        raise PayloadTooLarge(f"{param}: {count} are more than the limit of {limit}", param=param)


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
