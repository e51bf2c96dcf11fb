"""A tensor at rest: state that lives from step to step in the numbers of a cast, in memory allocated once.

Weights, gradients and moments are read as float32, changed, and written again. What is stored depends on the
cast:

    fp32, bf16, fp16        the tensor in that dtype
    with scales, 16 bits    values on the fp16 or bf16 grid, and the scales
    with scales, 8 bits     codes and scales, as `quantize` gives them; fewer bits packed into bytes
    range expansion         also the k and c of each block (`expand.py`)

Reading is exact; writing rounds, once. A NaN or an infinity makes its scaling block NaN, as anywhere.
"""

from dataclasses import replace

import torch

from narrowgauge.errors import UserError
from narrowgauge.formats import Stream, decode, format, round_to, torch_dtype, unpack
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.expand import Expansion, expansion, shrink, stretch
from narrowgauge.quantization.quantize import QTensor, emulate, quantize


class AtRest:
    """A tensor of a fixed shape in the numbers of a cast.

    Attributes:
        tensors: what is stored, by name; the same objects for its whole life, so that a checkpoint can hold
            them and a restart copy into them.
    """

    def __init__(self, shape: torch.Size, cast: Cast, device: torch.device | str = "cpu") -> None:
        """Zeros.

        Raises:
            UserError: a cast that state cannot have.
        """
        if cast.hadamard or cast.outliers or cast.history:
            raise UserError(
                f"cast {cast.name!r} of state: transforms, outliers and histories are for operands of a "
                "product; remove the key"
            )
        self.shape, self.cast = torch.Size(shape), cast
        self.tensors: dict[str, torch.Tensor] = {}
        zeros = torch.zeros(self.shape, device=device)
        for name, tensor in self._encoded(zeros, None).items():
            self.tensors[name] = tensor.clone()

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def read(self) -> torch.Tensor:
        """The stored numbers as float32, contiguous; for an fp32 cast the stored tensor itself."""
        t, cast = self.tensors, self.cast
        if not cast.is_scaled:
            return t["values"].float()
        if cast.element.bits == 16:
            return t["values"].float() * t["scale"]
        codes = unpack(t["codes"], cast.element, self.shape[-1] if self.shape else 1).view(self.shape)
        whole = t["tensor_scale"] if cast.scale == "e4m3" else torch.ones((), device=codes.device)
        q = QTensor(codes, self._scales(), None, whole, cast, self._blocks())
        x = q.dequantize()
        if cast.expand:
            blocks = self._blocks()
            x = blocks.merge(shrink(blocks.split(x), Expansion(t["k"], t["c"])))
        return x.contiguous()

    def write(self, x: torch.Tensor, stream: Stream | None = None) -> None:
        """Store float32 numbers; `stream` gives the random bits of a cast that rounds stochastically."""
        for name, tensor in self._encoded(x, stream).items():
            self.tensors[name].copy_(tensor)

    def move(self, device: torch.device) -> None:
        """Go to another device."""
        self.tensors = {name: t.to(device) for name, t in self.tensors.items()}

    def scale_by(self, factor: torch.Tensor) -> None:
        """Multiply by a 0-dim factor, without a change of codes where anything beside them is float32."""
        for name in ("c", "tensor_scale", "scale", "scales"):
            if name in self.tensors and self.tensors[name].dtype == torch.float32:
                self.tensors[name].mul_(factor)
                return
        self.write(self.read() * factor)

    def _encoded(self, x: torch.Tensor, stream: Stream | None) -> dict[str, torch.Tensor]:
        """What `tensors` are to hold for `x`."""
        cast = self.cast
        if not cast.is_scaled:
            if cast.rounding == "stochastic" and stream is not None:
                x = round_to(x, cast.element.name, cast.rounding, stream)
            return {"values": x.to(torch_dtype(cast.element))}
        if stream is None and cast.rounding == "stochastic":
            cast = replace(cast, rounding="nearest-even")
        if cast.element.bits == 16:
            values, scale = emulate(x, cast, -1, torch.float32, stream)
            assert scale is not None
            return {"values": values.to(torch_dtype(cast.element)), "scale": scale}
        extra = {}
        if cast.expand:
            blocks = self._blocks()
            split = blocks.split(x)
            e = expansion(split.abs(), blocks.inner, cast.element)
            x, extra = blocks.merge(stretch(split, e)), e._asdict()
        q = quantize(x, cast, generator=stream)
        scales = q.scales if q.scale_codes is None else q.scale_codes
        whole = {"tensor_scale": q.tensor_scale} if cast.scale == "e4m3" else {}
        return {"codes": q.packed(), "scales": scales} | whole | extra

    def _scales(self) -> torch.Tensor:
        scales = self.tensors["scales"]
        return scales if self.cast.scale == "fp32" else decode(scales, format(self.cast.scale))

    def _blocks(self) -> Blocks:
        return blocks_of(self.shape, self.cast, -1)
