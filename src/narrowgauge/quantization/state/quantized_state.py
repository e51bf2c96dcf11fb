"""Quantized state: a tensor that is stored from step to step in a cast, in memory allocated once.

Weights, gradients and moments are read as float32, updated, and written back. The stored form depends on the
cast:

    fp32, bf16, fp16        the tensor in that dtype
    with scales, 16 bits    values on the fp16 or bf16 grid, and the scales
    with scales, 8 bits     codes and scales, as from `quantize`; codes of fewer bits are packed into bytes
    range expansion         also the k and c of each block
    a codebook              codes into a table, and the amax of each block

Reading is exact; writing rounds once. A NaN or an infinity makes its scaling block NaN, as everywhere.

**Range expansion** (COAT, arXiv 2410.19313, section 4). The moments of a block cover few binades, while E4M3
has eighteen, so most of its codes are never used. Before quantization, each block is stretched to the
format's full range by a power,

    f(x) = sign(x) |x / c|^k        c = sqrt(largest * smallest),  k = log2(range) / log2(largest / smallest)

where largest and smallest are the block's magnitudes (without zeros), range = max^2 / 2 of the format, and k
is rounded down to the next 1/16. Decoding computes x = sign(y) |y|^(1/k) c. Relative rounding errors shrink
by a factor of k. A block with a single magnitude has k = 1.

**Codebooks**: the dynamic map of 8-bit optimizers (arXiv 2110.02861, section 1.3). Moments spread over many
decades, small ones far more often than large ones. The map has seven decades, from the block's amax down.
Each decade has half as many codes as the next larger one:

    signed      0, 1, and +-10^(e-6) times the midpoints of 2^e equal parts of [0.1, 1]        e = 0 .. 6
    unsigned    0, 1, and   10^(e-6) times the midpoints of 2^(e+1) such parts

Each map has 256 values. A block is divided by its amax and every element gets the code of the nearest value;
half way between two it gets the lower one.

State may be in host memory while a GPU computes with it: reading copies it to the GPU, writing copies the
result back. A kernel that updates state in place gets copies (`on_device`), which are then copied back
(`keep`). Values are the same in both memories. Copies to the host are asynchronous: call `wait` before you
read or write the stored tensors there.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

import torch

from narrowgauge.formats import Format, RandomStream, decode, format, round_to, torch_dtype, unpack
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.cast import Cast
from narrowgauge.quantization.context import QuantContext
from narrowgauge.quantization.keys import Consumer
from narrowgauge.quantization.quantize import QTensor, emulate_in_context, quantize_in_context
from narrowgauge.quantization.scales import rounded_sqrt
from narrowgauge.quantization.sharding.shard import TensorShard
from narrowgauge.system.devices import is_gpu
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import version_of

DECADES = 7
LARGEST_K = 64.0  # for a block whose magnitudes are nearly equal


class QuantizedState:
    """A tensor of a fixed shape, stored in a cast.

    Attributes:
        shape: The shape of the tensor; the local shape if it is sharded.
        cast: The cast that it is stored in.
        shard: The position of the local shard, or None.
        tensors: The stored tensors by name; the same objects for the state's lifetime, so that a checkpoint
            can hold them and a restart can copy into them.
        device: The device that computes with the tensor.
        on_host: Whether the tensor is in (pinned) host memory instead of a GPU's.
        gauge: If attached, called as `gauge(x, self)` with every float32 tensor written (`nn.gauges`).
    """

    def __init__(
        self,
        shape: torch.Size,
        cast: Cast,
        device: torch.device | str = "cpu",
        on_host: bool = False,
        shard: TensorShard | None = None,
    ) -> None:
        """Allocate zeros. Processes with shards of one tensor have to call `write` at the same time."""
        if unknown := cast.unsupported[Consumer.STATE]:
            raise UserError(
                f"cast {cast.name!r} of state: {', '.join(unknown)} is for operands of a matmul; remove the "
                "key"
            )
        self.shape, self.cast, self.shard = torch.Size(shape), cast, shard
        self.device, self.on_host = torch.device(device), on_host
        self.gauge: Callable[[torch.Tensor, QuantizedState], None] | None = None
        # copies from the host, the event that marks their arrival, and the versions of the tensors copied
        self.prefetched: tuple[dict[str, torch.Tensor], torch.cuda.Event | None, list[int]] | None = None
        self.tensors = self._zeros()
        self.move(self.device)

    def _zeros(self) -> dict[str, torch.Tensor]:
        if self.device.type != "meta":
            zeros = torch.zeros(self.shape, dtype=torch.float32, device=self.device)
            return _encoded(zeros, self.cast, None, None, self.shard)
        blank = _blank(self.shape, self.cast).items()
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in blank}

    def like(self, cast: Cast) -> "QuantizedState":
        """Zeros in a cast, of the same shape and in the same place."""
        return QuantizedState(self.shape, cast, self.device, self.on_host, self.shard)

    def read(self) -> torch.Tensor:
        """The values as float32, contiguous; fp32 state on its device returns the stored tensor itself."""
        t, cast = self.on_device(), self.cast
        if not cast.is_scaled:
            return t["values"].float()
        if cast.element.bits == 16:
            return t["values"].float() * t["scale"]
        q = self.quantized(t)
        blocks = q.blocks
        if cast.codebook:
            table = torch.tensor(code_values(cast.codebook), dtype=torch.float32, device=q.codes.device)
            return blocks.merge(blocks.split(table[q.codes.int()]) * q.aligned_scales()[0]).contiguous()
        x = q.dequantize()
        if cast.expand:
            y = blocks.split(x)
            x = blocks.merge(y.sign() * y.abs() ** (1 / t["k"]) * t["c"])
        return x.contiguous()

    def quantized(self, tensors: Mapping[str, torch.Tensor]) -> QTensor:
        """The stored codes and their scales; a codebook or an expansion gives them other values."""
        cast, scales = self.cast, tensors["scales"]
        codes = unpack(tensors["codes"], cast.element, self.shape[-1] if self.shape else 1).view(self.shape)
        scales = decode(scales, format(cast.scale)) if cast.has_coded_scales else scales.float()
        outer = tensors.get("tensor_scale", torch.ones((), dtype=torch.float32, device=codes.device))
        return QTensor(codes, scales, None, outer, cast, blocks_of(self.shape, cast, -1))

    @property
    def shares_scale(self) -> bool:
        """Whether `write` needs the amax over the shards of several processes."""
        return self.shard is not None and self.cast.is_scaled and self.cast.block is None

    def write(
        self,
        x: torch.Tensor,
        stream: RandomStream | None = None,
        encode_scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Store float32 values of the local shape.

        Args:
            x: The values.
            stream: The random bits of a cast that rounds stochastically; without them it rounds to nearest.
            encode_scale: 0-dim float32, used instead of the scale from `x` (one scale per tensor).
            amax: 0-dim float32, of the global tensor; processes with shards compute it now if it is unknown.
        """
        shard = replace(self.shard, global_amax=amax) if self.shard is not None else None
        for name, tensor in _encoded(x, self.cast, stream, encode_scale, shard).items():
            self.tensors[name].copy_(tensor, non_blocking=self.on_host)
        if self.gauge is not None:
            self.gauge(x, self)

    def move(self, device: torch.device) -> None:
        """Compute on another device from now on, and move the tensors there unless they are on the host."""
        self.device, self.prefetched = device, None
        if device.type != "meta" and any(t.is_meta for t in self.tensors.values()):
            self.tensors = self._zeros()  # there were no values
        to_host = self.on_host and device.type == "cuda"
        self.tensors = {n: t.cpu().pin_memory() if to_host else t.to(device) for n, t in self.tensors.items()}

    def fetch(self) -> None:
        """Start copying from the host to the GPU, in parallel with other work, for the next `read`."""
        if not self.is_offloaded:
            return
        stream = _copies(self.device) if self.device.type == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))  # any copy back is complete then
        with torch.cuda.stream(stream):  # None changes nothing
            copies = self._copies()
        event = None if stream is None else stream.record_event()
        self.prefetched = copies, event, self._versions()

    @property
    def is_offloaded(self) -> bool:
        """Whether the tensors are in another memory than that of the device that computes with them."""
        return self.on_host and is_gpu(self.device)

    def on_device(self) -> dict[str, torch.Tensor]:
        """The stored tensors on the device that computes with them; copies if they are elsewhere."""
        if not self.is_offloaded:
            return self.tensors
        copies, event, versions = self.prefetched or ({}, None, [])
        self.prefetched = None
        if versions != self._versions():  # nothing was fetched, or it was written since then
            return self._copies()
        if event is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(event)
            for tensor in copies.values():
                tensor.record_stream(now)
        return copies

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Store the tensors of `on_device`, in their order, after an in-place update."""
        if self.is_offloaded:
            for to, changed in zip(self.tensors.values(), tensors, strict=True):
                to.copy_(changed, non_blocking=True)

    def wait(self) -> None:
        """Wait for copies to the host; call it before host code reads or writes the stored tensors."""
        if self.is_offloaded and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _versions(self) -> list[int]:
        return [version_of(t) for t in self.tensors.values()]

    def _copies(self) -> dict[str, torch.Tensor]:
        return {n: t.to(self.device, non_blocking=True, copy=True) for n, t in self.tensors.items()}

    def scale_by(self, factor: torch.Tensor) -> None:
        """Multiply by a 0-dim factor; with float32 scales, only the scales change."""
        for name in ("c", "tensor_scale", "scale", "scales"):
            if name in self.tensors and self.tensors[name].dtype == torch.float32:
                self.tensors[name].mul_(factor.to(self.tensors[name].device))
                return
        self.write(self.read() * factor)


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream of copies from the host."""
    return torch.cuda.Stream(device)


def _encoded(
    x: torch.Tensor,
    cast: Cast,
    stream: RandomStream | None,
    scale: torch.Tensor | None,
    shard: TensorShard | None,
) -> dict[str, torch.Tensor]:
    """The stored tensors for float32 values; the arguments of `QuantizedState.write`."""
    if not cast.is_scaled:
        if cast.rounding == "stochastic" and stream is not None:
            bits = stream if shard is None else shard.bits_of(stream)
            x = round_to(x, cast.element.name, cast.rounding, bits)
        return {"values": x.to(torch_dtype(cast.element))}
    if stream is None and cast.is_random:
        cast = cast.to_nearest
    if cast.element.bits == 16:
        values, by = emulate_in_context(x, cast, -1, torch.float32, QuantContext(stream, shard=shard))
        assert by is not None
        return {"values": values.to(torch_dtype(cast.element)), "scale": by}
    blocks, extra = blocks_of(x.shape, cast, -1), {}
    if shard is not None and (cast.codebook or cast.expand):
        shard.require_aligned((cast.block or (0, 0))[1] or shard.shape[-1], -1, cast, "blocks")
    if cast.codebook:
        return _in_codebook(x, cast.codebook, blocks)
    if cast.expand:
        split, k, c = _expanded(blocks.split(x), blocks.inner, cast.element)
        x, extra = blocks.merge(split), {"k": k, "c": c}
    q = quantize_in_context(x, cast, -1, QuantContext(stream, scale=scale, shard=shard))
    scales = q.scales if q.scale_codes is None else q.scale_codes
    scales = scales.bfloat16() if cast.scale == "bf16" else scales
    tensor_scale = {} if cast.tensor_scale == "none" else {"tensor_scale": q.tensor_scale}
    return {"codes": q.packed(), "scales": scales} | tensor_scale | extra


@cache
def _blank(shape: torch.Size, cast: Cast) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shapes and dtypes of the stored tensors."""
    zeros = torch.zeros(shape, dtype=torch.float32, device="meta")
    return {name: (t.shape, t.dtype) for name, t in _encoded(zeros, cast, None, None, None).items()}


def _in_codebook(x: torch.Tensor, name: str, blocks: Blocks) -> dict[str, torch.Tensor]:
    """The "codes" of a float32 tensor and the "scales" that divided its blocks."""
    split = blocks.split(x)
    largest = split.abs().amax(blocks.inner, keepdim=True)
    divisor = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    codes = blocks.merge(to_codes(split / divisor, name)).contiguous()
    return {"codes": codes, "scales": torch.where(largest.isfinite(), divisor, torch.nan).view(blocks.grid)}


def _expanded(x: torch.Tensor, inner: tuple[int, ...], element: Format) -> tuple[torch.Tensor, ...]:
    """f(x) of a split float32 tensor, and the k and c of each block, inner dimensions kept with size 1."""
    magnitudes = x.abs()
    largest = magnitudes.amax(inner, keepdim=True)
    smallest = torch.where(magnitudes > 0, magnitudes, math.inf).amin(inner, keepdim=True)
    is_zero = largest == 0
    largest, smallest = torch.where(is_zero, 1.0, largest), torch.where(is_zero, 1.0, smallest)
    binades = torch.log2(largest) - torch.log2(smallest)
    available = math.log2(element.max * element.max / 2)
    k = torch.floor(available / binades * 16) / 16
    k = torch.where(binades > 0, k.clamp(1 / 16, LARGEST_K), 1.0)
    c = rounded_sqrt(largest) * rounded_sqrt(smallest)
    return x.sign() * (magnitudes / c) ** k, k, c


@cache
def code_values(name: str) -> tuple[float, ...]:
    """The 256 values of a map in ascending order, exact float32."""
    signed = name == "dynamic"
    values = [0.0, 1.0]
    for e in range(DECADES):
        parts = 2**e if signed else 2 ** (e + 1)
        middles = [0.1 + 0.9 * (i + 0.5) / parts for i in range(parts)]
        values += [10.0 ** (e - DECADES + 1) * m * s for m in middles for s in ((1, -1) if signed else (1,))]
    return tuple(torch.tensor(sorted(values), dtype=torch.float32, device="cpu").tolist())


def to_codes(x: torch.Tensor, name: str) -> torch.Tensor:
    """The uint8 codes of the values nearest to a float32 tensor in [-1, 1]."""
    values = torch.tensor(code_values(name), dtype=torch.float64, device=x.device)
    middles = (values[:-1] + values[1:]) / 2  # exact, and so is the comparison
    return torch.bucketize(x.double(), middles, out_int32=True).to(torch.uint8)
