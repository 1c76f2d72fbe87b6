"""What must hold after every schedule."""

from __future__ import annotations

from tests.simulation.client import Client
from tests.simulation.expected import Expected, expected_of, expected_prompt_logprobs
from tests.simulation.fleet import Fleet


def wrongs_of(fleet: Fleet) -> list[str]:
    found = [f"left over: {each}" for each in fleet.leaks()]
    for client in fleet.clients:
        found += [f"{client.plan.request_id}: {each}" for each in wrongs_of_client(client)]
    return found


def wrongs_of_client(client: Client) -> list[str]:
    found = list(client.wrongs)
    if client.opened_at is None:
        return found
    if client.is_open:
        found.append("has no ending")
    is_whole = client.end is not None and client.end.error is None
    for index, expected in enumerate(expected_of(client.plan)):
        told = client.choices[index]
        found += _wrongs_of_tokens(index, told.token_ids, expected.token_ids, is_whole=is_whole)
        if told.logprobs != expected.logprobs[: len(told.logprobs)]:
            found.append(f"choice {index}: other logprobs")
        if client.plan.sampling.num_logprobs is not None and len(told.logprobs) < len(
            told.token_ids
        ):
            found.append(f"choice {index}: tokens without logprobs")
        found += _wrongs_of_ending(index, client, expected)
    wanted = expected_prompt_logprobs(client.plan)
    if any(each != wanted for each in client.prompt_logprobs):
        found.append("other logprobs of the prompt")
    if is_whole and len(wanted) > 0 and not client.prompt_logprobs:
        found.append("no logprobs of the prompt")
    return found


def _wrongs_of_tokens(
    index: int, told: list[int], expected: list[int], *, is_whole: bool
) -> list[str]:
    if told != expected[: len(told)]:
        return [f"choice {index}: tokens {told} are not those of {expected}"]
    if is_whole and len(told) < len(expected):
        return [f"choice {index}: {len(told)} of {len(expected)} tokens"]
    return []


def _wrongs_of_ending(index: int, client: Client, expected: Expected) -> list[str]:
    told = client.choices[index]
    if told.is_stopped:  # the worker may have ended it by itself with the same token
        return []
    if told.finish is not None and told.finish.reason != expected.finish_reason:
        return [f"choice {index}: ended by {told.finish.reason}, not {expected.finish_reason}"]
    return []
