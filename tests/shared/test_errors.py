from __future__ import annotations

from shared.errors import ERROR_BY_CODE, HearthError, InvalidRequest, NoResponders, UnknownModel


def test_codes_are_unique_and_table_is_complete() -> None:
    assert all(each.code == code for code, each in ERROR_BY_CODE.items())
    assert ERROR_BY_CODE["internal_error"] is HearthError
    assert ERROR_BY_CODE["no_responders"] is NoResponders
    assert issubclass(ERROR_BY_CODE["model_not_found"], InvalidRequest)
    assert len({each.code for each in ERROR_BY_CODE.values()}) == len(ERROR_BY_CODE) >= 17


def test_error_has_fields_and_http_status() -> None:
    error = UnknownModel("no model 'x'", param="model", retry_after_s=0.0)
    assert (str(error), error.param, error.retry_after_s) == ("no model 'x'", "model", 0.0)
    assert (error.http_status, error.openai_type) == (404, "invalid_request_error")
