"""What to do instead, for clients of a path that Hearth does not have."""

from __future__ import annotations

NOTHING = "there is no such route"
BASE = "/v1"
DOUBLED = f"{BASE}{BASE}/"
NO_FILES = "Hearth stores no files: put their text into the request"
NO_AUDIO = "Hearth neither reads nor makes audio: it serves language models"
NO_TRAINING = "Hearth trains no models"
NO_ASSISTANTS = "Hearth has no assistants: use /v1/responses with previous_response_id"
NO_BATCHES = "Hearth has no batch API: send requests with a lower priority"
# by the first parts of a path, without /v1; the longest comes first
ABSENT: dict[str, str] = {
    "messages/batches": "Hearth has no batch API: send the messages one by one",
    "batches": NO_BATCHES,
    "files": NO_FILES,
    "uploads": NO_FILES,
    "vector_stores": NO_FILES,
    "images": "Hearth makes no images: it serves language models",
    "videos": "Hearth makes no videos: it serves language models",
    "audio": NO_AUDIO,
    "moderations": "Hearth has no moderation model",
    "fine_tuning": NO_TRAINING,
    "fine-tunes": NO_TRAINING,
    "assistants": NO_ASSISTANTS,
    "threads": NO_ASSISTANTS,
    "realtime": "Hearth has no realtime API: use /v1/responses with stream",
    "complete": "Hearth has no text completions of Anthropic: use /v1/messages",
}
OLLAMA = "Hearth does not have the API of Ollama: use /v1/chat/completions"
# the first parts of paths that Hearth has below /v1 alone
SERVED = ("chat", "completions", "embeddings", "messages", "models", "prefixes", "responses")


def missing_route(path: str) -> str:
    """Returns the message for a path that no route has."""
    if path.startswith(DOUBLED):
        return f"{NOTHING}: the base URL has {BASE} that the client adds itself: leave it out"
    if path.startswith("/api/"):
        return f"{NOTHING}: {OLLAMA}"
    parts = path.removeprefix(BASE).strip("/")
    for start, text in ABSENT.items():
        if parts == start or parts.startswith(f"{start}/"):
            return f"{NOTHING}: {text}"
    if path.strip("/").split("/")[0] in SERVED:
        return f"{NOTHING}: the base URL must end with {BASE}"
    return NOTHING
