"""The questions that `hearth up` asks a cluster that has just started.

The first has a long prompt: a prefill worker computes it and pushes its KV to decode. The second
has the same beginning: its KV is in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import httpx
from rich.console import Console
from rich.text import Text

from services.client.chat_request import (
    ChatReply,
    ListedModel,
    first_model,
    gateway_client,
    stream_chat,
    stream_completion,
)
from services.client.word_wrap import WordWrap
from shared.clock import Clock
from shared.errors import HearthError

QUESTIONS = ("What is Hearth?", "What is the KV cache?")
NO_TEMPLATE = "this model has no chat template"  # the gateway's words
BASE_MODEL_TOKENS = 64  # which end no answer
MIN_CONTEXT_TOKENS = 2048  # holds the instructions, a question and its answer

Observer = tuple[str, str]  # NATS URL and process id of a process that may read heartbeats


def text_printer(console: Console) -> Callable[[str], None]:
    """Writes each text delta at once, in a terminal with breaks between words."""
    wrap = WordWrap(console.width).wrap if console.is_terminal else str

    def on_text(text: str) -> None:
        console.file.write(wrap(text))
        console.file.flush()

    return on_text


def print_line(console: Console, text: str, *, style: str = "") -> None:
    """Prints a text with breaks between words in a terminal, else on one line."""
    console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)


def describe(reply: ChatReply) -> str:
    """Returns one line: times, cached tokens and the workers that served the request. The time
    between tokens is left out if they came at once.
    """
    itl = f"{reply.median_itl_s * 1e3:.1f}"
    between = "" if itl == "0.0" else f" · between tokens {itl} ms (median)"
    prefill, decode = reply.hearth.get("prefill_worker"), reply.hearth.get("decode_worker")
    return (
        f"first token {reply.ttft_s * 1e3:.1f} ms{between} · "
        f"cached {reply.num_cached_tokens} of {reply.num_prompt_tokens} prompt tokens · "
        + (f"prefill {prefill} · decode {decode}" if prefill else f"prefill and decode {decode}")
    )


async def first_requests(
    url: str,
    api_key: str,
    console: Console,
    clock: Clock,
    *,
    observer: Observer | None,
    is_check: bool,
    model_name: str = "",
    certificate: str = "",
) -> bool:
    """Sends the QUESTIONS and prints the responses. Returns False for a base model, which has no
    chat template. Raises HearthError on failure if `is_check`.

    Otherwise a failure is printed, and the cluster stays up, as it repairs itself. Without an
    `observer` the time of the push is not printed.
    """
    try:
        async with gateway_client(url, api_key, certificate) as client:
            model = await first_model(client, model_name)
            first, second = QUESTIONS
            reply, is_chat = await _show_answer(client, model, first, console, clock)
            if reply.hearth.get("prefill_worker"):
                print_line(console, await _describe_push(reply, observer))
            reply, _ = await _show_answer(client, model, second, console, clock)
            print_line(console, _describe_cache(reply))
            return is_chat
    except HearthError as error:
        if is_check:
            raise
        console.print(f"\nno answer: {error}", style="red", markup=False)
    return True


async def _show_answer(
    client: httpx.AsyncClient, model: ListedModel, question: str, console: Console, clock: Clock
) -> tuple[ChatReply, bool]:
    """Returns the reply, and whether the model has a chat template."""
    instructions = _instructions() if model.max_context >= MIN_CONTEXT_TOKENS else ""
    messages = [{"role": "user", "content": question}]
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    console.print(Text.assemble("\n", (model.id, "bold"), f" > {question}"))
    on_text, is_chat = text_printer(console), True
    try:
        reply = await stream_chat(client, model.id, messages, clock, on_text)
    except HearthError as error:
        if NO_TEMPLATE not in error.message:
            raise
        is_chat = False
        console.print("(a base model, without a chat template: it continues the text)", style="dim")
        prompt = "\n\n".join(filter(None, (instructions, question)))
        limit = {"max_tokens": BASE_MODEL_TOKENS}
        reply = await stream_completion(client, model.id, prompt, clock, on_text, **limit)
    console.print("\n")
    print_line(console, describe(reply), style="dim")
    return reply, is_chat


def _instructions() -> str:
    return files("services.client").joinpath("first_prompt.txt").read_text().strip()


def _describe_cache(reply: ChatReply) -> str:
    return (
        f"the prefix cache held {reply.num_cached_tokens} of {reply.num_prompt_tokens} prompt "
        "tokens: they were not computed again"
    )


async def _describe_push(reply: ChatReply, observer: Observer | None) -> str:
    from services.client.pushed_kv import pushed_kv  # and NATS, which `hearth chat` does not need

    served = reply.hearth
    num_tokens = served.get("num_pushed_tokens") or 0
    text = (
        f"{served['prefill_worker']} computed the prompt and pushed KV of {num_tokens} tokens "
        f"to {served.get('decode_worker')}"
    )
    if observer is None:
        return text
    pushed = await pushed_kv(*observer, served["prefill_worker"], num_tokens=num_tokens)
    if pushed is None:
        return text
    return (
        f"{text}: {pushed.num_bytes / 1e6:.1f} MB in {pushed.push_s * 1e3:.1f} ms, "
        f"{pushed.megabytes_per_s:,.0f} MB/s"
    )
