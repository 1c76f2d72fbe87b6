"""Model ids of Workers AI: `@cf/author/name`, or the native name of a model."""

from __future__ import annotations

from shared.errors import InvalidRequest

MAX_MODEL_ID_CHARS = 256


class MalformedModelId(InvalidRequest):
    code = "malformed_model_id"
    http_status = 404


def parse_model_id(path: str) -> str:
    """Returns the id that the end of a path holds, with or without its first slash.

    Raises MalformedModelId.
    """
    model_id = path.removeprefix("/")
    if len(model_id) > MAX_MODEL_ID_CHARS:
        raise _malformed(f"has {len(model_id)} characters, more than {MAX_MODEL_ID_CHARS}")
    if not model_id:
        raise _malformed("is missing: the path ends with it, as in ai/run/@cf/author/name")
    if not model_id.isprintable() or any(map(str.isspace, model_id)):
        raise _malformed("holds a space or a control character")
    if any(part in ("", ".", "..") for part in model_id.split("/")):
        raise _malformed(f"{model_id!r} holds an empty part, `.` or `..`")
    return model_id


def _malformed(problem: str) -> MalformedModelId:
    return MalformedModelId(f"the model id {problem}", param="model")
