"""The bounds of output that clients have not taken: one stream's, and one tenant's."""

from __future__ import annotations

from services.gateway.request.unsent_output import UnsentOutput, UnsentResponse


class Case:
    def __init__(self) -> None:
        self.unsent = UnsentOutput(max_response_bytes=100, max_tenant_bytes=250)
        self.ended: list[str] = []

    def open(self, name: str, tenant_id: str = "t", *, is_streamed: bool = True) -> UnsentResponse:
        response = self.unsent.open(tenant_id)
        response.watch(lambda: self.ended.append(name), is_streamed=is_streamed)
        return response


def test_stream_beyond_its_bound_ends_once() -> None:
    case = Case()
    response = case.open("a")
    for num_bytes in (60, -50, 90, 1, 1):
        response.add(num_bytes)
    assert case.ended == ["a"]
    assert case.unsent.num_bytes("t") == 0  # its owner drops the output


def test_bytes_that_a_client_took_do_not_count() -> None:
    case = Case()
    response = case.open("a")
    for _ in range(10):
        response.add(100)
        response.add(-100)
    assert case.ended == []


def test_largest_response_of_a_tenant_ends_beyond_the_tenants_bound() -> None:
    case = Case()
    small, large, other = (
        case.open("small"),
        case.open("large", is_streamed=False),
        case.open("other", "u", is_streamed=False),
    )
    other.add(250)
    large.add(180)
    small.add(60)
    assert case.ended == []
    small.add(30)
    assert case.ended == ["large"]
    assert case.unsent.num_bytes("t") == 90


def test_closed_responses_leave_nothing() -> None:
    case = Case()
    response = case.open("a")
    response.add(50)
    response.close()
    response.close()
    response.add(500)
    assert (case.ended, case.unsent.num_bytes("t"), case.unsent._tenants) == ([], 0, {})


def test_bound_exceeded_before_the_response_starts_ends_it_at_its_start() -> None:
    case = Case()
    response = case.unsent.open("t")
    response.add(251)
    response.watch(lambda: case.ended.append("a"), is_streamed=True)
    assert case.ended == ["a"]
