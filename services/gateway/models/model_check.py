"""Reads and tries what a checkpoint brings, in a process with limits: python -m … MODEL_DIR CHOICE
TOOL_FORMAT TEMPLATE_FILE.

Templates, tokenizers and patterns are programs of a checkpoint's author: they may never end, take
all memory or end the process. Writes a `ModelCheck` to its output. `checked_model.py` starts it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path

import msgspec
import regex

from services.gateway.structured.grammars.thinking import Spellings, mark_spellings
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.family_choice import family_of
from services.gateway.structured.tools.parsing.parsing import ResponseParsing
from services.gateway.text.checkpoint.tokenizer_costs import check_size, check_token_lengths
from services.gateway.text.decoding.token_table import TokenTable
from services.gateway.text.model_files import ModelFiles, ModelText, read_tokenizer
from shared.errors import ConfigError, HearthError
from shared.transport.wire_errors import printable_line

CPU_LIMIT_S = 60
PROGRAM_LIMIT_S = 2.0  # CPU time, of compiling templates and patterns
MEMORY_LIMIT_BYTES = 3 << 30
MAX_REPLY_BYTES = 48 << 20  # the tokens of the largest vocabularies take 10 MB
MAX_REASON_CHARS = 300
MAX_MARK_CHARS = 256
MAX_ADDED_AROUND = 64  # tokens that a tokenizer adds to any text
# The time of the steps that the gateway repeats on its event loop.
MAX_PATTERNS_S = 0.05  # those of known families take 3 ms
MAX_TOKENIZER_S = 30.0  # a vocabulary of 260,000 tokens takes 7 s


class CheckedModel(msgspec.Struct, frozen=True):
    """What the gateway needs of a model, from files that were read within the limits. `family`: how
    the model writes calls and reasoning; `spellings`: the marks of its reasoning.
    """

    text: ModelText
    family: Family
    spellings: Spellings


class ModelCheck(msgspec.Struct, frozen=True):
    """`failure`: empty if the files can be used."""

    model: CheckedModel | None = None
    failure: str = ""


def main() -> None:
    model_dir, choice, tool_format, template_file = sys.argv[1:]
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # log lines go there
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, most))
    # SIGXCPU at the first limit; SIGKILL, at the second, is what others send
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(output, "wb") as file:
        found = check(Path(model_dir), choice, tool_format, template_file)
        file.write(encoded_check(found, model_dir))


def encoded_check(found: ModelCheck, model_dir: str) -> bytes:
    reply = msgspec.msgpack.encode(found)
    if len(reply) <= MAX_REPLY_BYTES:
        return reply
    excess = f"{len(reply)} bytes, the limit is {MAX_REPLY_BYTES}"
    return msgspec.msgpack.encode(ModelCheck(failure=f"{model_dir}: its texts take {excess}"))


def check(model_dir: Path, choice: str, tool_format: str, template_file: str = "") -> ModelCheck:
    try:
        return ModelCheck(_checked(model_dir, choice, tool_format, template_file))
    except HearthError as error:
        reason = error.message
    except BaseException as error:  # anybody may have written the files
        reason = f"{type(error).__name__}: {error}"
    named = reason if str(model_dir) in reason else f"{model_dir}: {reason}"
    return ModelCheck(failure=printable_line(named, MAX_REASON_CHARS))


def _checked(model_dir: Path, choice: str, tool_format: str, template_file: str) -> CheckedModel:
    _, text, _ = read_tokenizer(model_dir)  # once: one of another form is converted
    check_size(text)
    began_s = time.process_time()
    files = ModelFiles(model_dir, template_file)
    _check_time("tokenizer", time.process_time() - began_s, MAX_TOKENIZER_S)
    try:
        check_token_lengths(files.tokenizer.tokenizer.get_vocab(with_added_tokens=True))
        if files.tokenizer.num_added_around > MAX_ADDED_AROUND:
            raise ConfigError(f"it adds more than {MAX_ADDED_AROUND} tokens to any text")
        _check_decoding(files.tokens)
    except HearthError as error:
        raise ConfigError(f"tokenizer: {error.message}") from None
    signal.setitimer(signal.ITIMER_PROF, PROGRAM_LIMIT_S)
    if files.chat_template is not None:
        files.chat_template.compiled()
    family = family_of(files, choice, tool_format=tool_format)
    regex.purge()  # they are compiled here as in the gateway
    began_s = time.process_time()
    ResponseParsing(family, files.tokens.added_ids)
    _check_time("response template", time.process_time() - began_s, MAX_PATTERNS_S)
    for mark in filter(None, (family.think_open, family.think_close)):
        if len(mark) > MAX_MARK_CHARS:
            raise ConfigError(f"response_template: a mark of {len(mark)} characters is too long")
    return checked_files(files, family)


def _check_decoding(tokens: TokenTable) -> None:
    """Raises HearthError for a decoder that fails on one token or on none: each of its steps takes
    each token by itself, or the text of all.
    """
    tokens.decode(())
    for token_id in range(len(tokens.spellings)):
        tokens.decode((token_id,))


def checked_files(files: ModelFiles, family: Family) -> CheckedModel:
    """Reads files that are trusted or have passed the check."""
    text = ModelText(**{each.name: getattr(files, each.name) for each in fields(ModelText)})
    return CheckedModel(text, family, mark_spellings(family, files.tokenizer.spellings))


def _check_time(what: str, seconds: float, most: float) -> None:
    if seconds > most:
        raise ConfigError(f"its {what} takes {seconds:.1f} s to load, the limit is {most:g} s")


if __name__ == "__main__":
    main()
