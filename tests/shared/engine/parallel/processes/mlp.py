"""A small tensor-parallel model: two MLPs and a vocabulary, cut over ranks and stages.

Every product is computed by lane, at every number of ranks, so that no bit may change with it.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from shared.engine.parallel.lanes import NUM_LANES, lane_borders, rank_lanes
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.processes.rank_messages import RankIdentity
from shared.engine.parallel.processes.rank_process import OneByOne, RankContext

HIDDEN, WIDTH, VOCAB, NUM_LAYERS = 24, 29, 40, 2  # 29 columns are uneven lanes


class Mlp:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        stage, tp_rank = mesh.shape.place(mesh.rank)
        self._lanes = range(*rank_lanes(tp_rank, mesh.shape.tp))
        self._layers = range(NUM_LAYERS)[stage * NUM_LAYERS // mesh.shape.pp :][
            : NUM_LAYERS // mesh.shape.pp
        ]
        self._is_first, self._is_last = stage == 0, stage == mesh.shape.pp - 1

    def run(self, rows: int, seed: int) -> bytes:
        """The bits of the logits and of the best ids, in the last stage; b"" in others."""
        x = _random((rows, HIDDEN), seed) if self._is_first else self._receive(rows)
        for layer in self._layers:
            x = x + self._layer(x, layer)
        if not self._is_last:
            self._mesh.send(x)
            return b""
        return self._logits(x)

    def _receive(self, rows: int) -> Tensor:
        return self._mesh.recv((rows, HIDDEN), torch.bfloat16)

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        up, down = _random((WIDTH, HIDDEN), 100 + layer), _random((HIDDEN, WIDTH), 200 + layer)
        borders = lane_borders(WIDTH)
        partials = []
        for lane in self._lanes:
            part = slice(borders[lane], borders[lane + 1])
            hidden = torch.relu(x @ up[part].t())
            partials.append(hidden.float() @ down[:, part].float().t())
        return self._mesh.add(torch.stack(partials), torch.bfloat16)

    def _logits(self, x: Tensor) -> bytes:
        width = VOCAB // NUM_LANES
        head = _random((VOCAB, HIDDEN), 300)
        parts = [x @ head[lane * width : (lane + 1) * width].t() for lane in self._lanes]
        own = torch.cat(parts, 1)
        logits = self._mesh.gather(own, 1)
        ids = own.argmax(dim=1)
        first = self._lanes.start * width
        _, best = self._mesh.best(own.gather(1, ids[:, None])[:, 0], ids + first)
        assert torch.equal(best, logits.argmax(dim=1))
        return logits.contiguous().view(torch.uint8).numpy().tobytes()


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class MlpWork(OneByOne):
    """A plan names the transport, the rows and the seed."""

    identity = RankIdentity("digest", "layout", "numerics", str(torch.__version__))

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        is_on_hosts = context.start.transport == "hosts"
        names = ("hosts",) if is_on_hosts else ("shared_memory", "gloo")
        self._mlps = {name: Mlp(context.mesh(name)) for name in names}

    def run(self, step: int, plan: bytes) -> bytes:
        transport, rows = msgspec.json.decode(plan)
        return self._mlps[transport].run(rows, seed=step)
