"""The endpoints of all dialects that generate, by the names of their large bodies."""

from services.gateway.openai.endpoints import CHAT, COMPLETIONS, EMBEDDINGS
from services.gateway.request.endpoint import Endpoint

ENDPOINTS: dict[str, Endpoint] = {each.name: each for each in (CHAT, COMPLETIONS, EMBEDDINGS)}
