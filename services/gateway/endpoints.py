"""The endpoints of all dialects that generate, by the names of their large bodies."""

from services.gateway.anthropic.endpoint import MESSAGES
from services.gateway.openai.endpoints import CHAT, COMPLETIONS, EMBEDDINGS
from services.gateway.request.endpoint import Endpoint
from services.gateway.reranking.endpoints import RERANK, SCORE
from services.gateway.responses.endpoint import RESPONSES
from services.gateway.workers_ai.endpoint import run_endpoint

_ALL = (CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RERANK, RESPONSES, SCORE, run_endpoint())
ENDPOINTS: dict[str, Endpoint] = {each.name: each for each in _ALL}
