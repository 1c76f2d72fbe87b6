"""A rank's part of a `Decoder`: of its stage's layers, some heads and columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.ops import SumLanes, argmax
from shared.engine.layers.embedding import OutputHead, TokenEmbedding
from shared.engine.layers.norm import RMSNorm
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.decoder import DecoderLayer, LayerStack
from shared.engine.parallel.cuts import column_lanes, head_lanes
from shared.engine.parallel.lanes import EMPTY_LANE, rank_lanes
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.rank_part import RankPart, local_config


class RankDecoder(LayerStack):
    """One rank's part of a decoder. `config` is the whole model's. The bits are those of `Decoder`,
    for any number of ranks.

    `vocabulary` has the tokens of each rank of the stage. `embed_tokens`, `norm` and `lm_head` are
    None on ranks of other stages.
    """

    def __init__(
        self,
        config: ModelConfig,
        part: RankPart,
        vocabulary: Sequence[range],
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        num_positions: int,
    ) -> None:
        local = local_config(config, part)
        super().__init__(local, dtype=dtype, num_positions=num_positions)
        self.config = config
        self._part = part
        self._mesh = mesh
        self._widths = tuple(map(len, vocabulary))
        self.embed_tokens: TokenEmbedding | None = None
        self.norm: RMSNorm | None = None
        self.lm_head: OutputHead | None = None
        embedding = TokenEmbedding(
            local.vocab_size, config.hidden_size, scale=config.embedding_scale, dtype=dtype
        )
        if part.has_embedding or (part.has_head and config.has_tied_embeddings):
            self.embed_tokens = embedding
        if part.has_head:
            self.norm = RMSNorm(config.hidden_size, config, dtype=dtype)
            self.lm_head = OutputHead(
                embedding, is_tied=config.has_tied_embeddings, softcap=config.logit_softcap
            )
        if mesh.shape.tp > 1 or mesh.exchange == "bf16":
            self._join(config)

    def _join(self, config: ModelConfig) -> None:
        """Sums row-parallel GEMMs over the ranks of the stage, in the lanes of the whole."""
        shape, rank = self._mesh.shape, self._mesh.rank
        lanes = rank_lanes(shape.place(rank)[1], shape.tp)
        output = SumLanes.of(head_lanes(config.num_heads, config.output_dim)).part(*lanes)
        down = SumLanes.of(column_lanes(config.intermediate_size)).part(*lanes)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.join(self._mesh, output, down)

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, hidden]. Each token's vector is on one rank."""
        assert self.embed_tokens is not None, "of the first stage"
        tokens = self._part.vocabulary
        is_own = (input_ids >= tokens.start) & (input_ids < tokens.stop)
        vectors = self.embed_tokens(torch.where(is_own, input_ids - tokens.start, 0))
        own = vectors.float().masked_fill_(~is_own.unsqueeze(1), EMPTY_LANE)
        return self._mesh.join(own, vectors.dtype)

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the final norm: [T, hidden] -> the same shape."""
        assert self.norm is not None, "of the last stage"
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, vocab_size] FP32, on each rank of the last stage."""
        assert self.lm_head is not None, "of the last stage"
        return self._mesh.gather(self.lm_head(self.normed(hidden)), 1, self._widths)

    def argmax_tokens(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R] ids of the largest logits, the first of equal ones."""
        return argmax(self.logits(hidden))

    def fuse(self) -> None:
        """Layers of ranks exchange sums, so no kernel computes them whole."""

    def weight_destinations(self) -> dict[str, Tensor]:
        """Returns the checkpoint's tensor names -> the rank's parts."""
        found = self.layer_destinations(self._part.layers.start)
        if self.embed_tokens is not None:
            found["model.embed_tokens.weight"] = self.embed_tokens.parameter
        if self.norm is not None:
            found["model.norm.weight"] = self.norm.weight
        if self.lm_head is not None and not self.config.has_tied_embeddings:
            found["lm_head.weight"] = self.lm_head.parameter
        return {name: tensor.detach() for name, tensor in found.items()}
