from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from kernels.ops import LaneWeight, QuantizedWeight, SumLanes, Weight, pack_lanes, pack_weight
from shared.engine.layers.methods.choose import choose_method
from shared.engine.layers.methods.linear_method import LinearMethod
from shared.engine.layers.quantized_store import QuantizedStore, quantized_store
from shared.engine.model_config.formats import WeightFormat
from shared.engine.parallel.lanes import NUM_LANES
from shared.engine.parallel.mesh import Mesh


class MatrixModule(nn.Module):
    """A module with one weight [N, K], initially unset, and the method that computes with it.

    A checkpoint fills `parameter`. `replace_weight` then sets another form of the weight; each
    form has its method.
    """

    weight: Weight
    method: LinearMethod
    lanes: SumLanes | None = None  # lanes of a row-parallel GEMM
    is_batch_invariant = True

    def set_parameter(self, parameter: nn.Parameter) -> None:
        self.weight = parameter
        self._choose()

    @property
    def parameter(self) -> Tensor:
        """The weight in the form that a checkpoint fills."""
        assert isinstance(self.weight, Tensor)
        return self.weight

    def replace_weight(self, weight: Weight) -> None:
        del self.weight
        self.weight = weight
        self._choose()

    def set_batch_invariance(self, *, is_batch_invariant: bool) -> None:
        """Whether a row's bits must not depend on the other rows."""
        self.is_batch_invariant = is_batch_invariant
        self._choose()

    def _choose(self) -> None:
        self.method = choose_method(
            self.weight, is_batch_invariant=self.is_batch_invariant, lanes=self.lanes
        )


class MatmulModule(MatrixModule):
    """A module that multiplies with its weight. `share` is the part of the weight
    that a token uses.

    `store` is that of a quantized weight. The parameter is then its memory, and no GEMM uses it.
    """

    is_compressible = True
    share = 1.0
    store: QuantizedStore | None = None

    def pack(self) -> None:
        """Replaces the parameter by the form that the device multiplies with."""
        if isinstance(self.weight, Tensor):
            self.replace_weight(self.packed(self.weight))

    def quantize(self, form: WeightFormat, rows: Sequence[int], width: int | None = None) -> None:
        """Replaces the weight by a quantized one: see `Quantizable`."""
        unset = self.parameter
        width = unset.shape[1] if width is None else width
        self.store = quantized_store(form, rows, width, unset.dtype)
        memory = torch.empty(self.store.num_bytes, dtype=torch.uint8, device=unset.device)
        self.replace_weight(nn.Parameter(memory, requires_grad=False))

    def packed(self, weight: Tensor) -> LaneWeight | QuantizedWeight:
        """Returns a dense weight [N, K], one that is packed already, or a store's
        memory, in that form.
        """
        if self.store is not None:
            return self.store.transcoded(weight)
        return pack_weight(weight) if self.lanes is None else pack_lanes(weight, self.lanes)


class Linear(MatmulModule):
    """y = x · weightᵀ + bias over x [T, in_features].

    `lane_borders` are those of a row-parallel GEMM, which sums over K in lanes. A rank's part of
    one is joined to a mesh, which sums it over all ranks before the bias.
    """

    mesh: Mesh | None = None
    num_sums = 1  # sums that the mesh adds: one a lane in BF16 exchange, which rounds them

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        lane_borders: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.lanes = None if lane_borders is None else SumLanes.of(lane_borders)
        self.set_parameter(unset_parameter(out_features, in_features, dtype=dtype))
        self.bias = unset_parameter(out_features, dtype=dtype) if has_bias else None

    @property
    def num_rows(self) -> int:
        """Output rows of the unset weight."""
        return self.parameter.shape[0]

    def join(self, mesh: Mesh, lanes: SumLanes) -> None:
        """Joins a rank's part to its mesh. `lanes` are those of the whole GEMM's that
        the part holds.
        """
        self.mesh, self.lanes = mesh, lanes
        self.num_sums = NUM_LANES // mesh.shape.tp if mesh.exchange == "bf16" else 1
        self._choose()

    def destinations(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {"weight": self.parameter}
        if self.store is not None:
            (found,) = self.store.parts(self.parameter)
        return found if self.bias is None else {**found, "bias": self.bias}

    def part_destinations(self, rows: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns the destinations of the linear layers that a checkpoint has instead of this one:
        name -> output rows.
        """
        sizes = list(rows.values())
        if self.store is None:
            weights = [{"weight": each} for each in self.parameter.split(sizes)]
        else:
            weights = self.store.parts(self.parameter)
        biases = [] if self.bias is None else [{"bias": each} for each in self.bias.split(sizes)]
        return {
            f"{part}.{kind}": tensor
            for parts in (weights, biases)
            for part, tensors in zip(rows, parts, strict=False)
            for kind, tensor in tensors.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return self.method(x, self.bias)
        product = self.mesh.add(self.method.partials(x, self.num_sums), x.dtype)
        return product if self.bias is None else product + self.bias


_unset_on: ContextVar[torch.device | None] = ContextVar("unset_on", default=None)


@contextmanager
def weights_unset_on(device: torch.device) -> Iterator[None]:
    """Creates unset weights on `device` inside the context, whatever the default device: on the
    meta device they take no memory until a checkpoint's are there.
    """
    token = _unset_on.set(device)
    try:
        yield
    finally:
        _unset_on.reset(token)


def unset_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    unset = torch.empty(shape, dtype=dtype, device=_unset_on.get())
    return nn.Parameter(unset, requires_grad=False)
