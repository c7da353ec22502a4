# SPDX-License-Identifier: Apache-2.0
"""What the codec's decoder is trained with: an encoder, quantizers and discriminators.

None of it is shipped: the checkpoint's voices are in its weights, it encodes no recordings.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

SAMPLE_RATE = 24_000
_DECAY = 0.99
_RARE = 0.05
"""Share of the average use below which an entry is replaced by something that was heard."""
_FLOOR = 1e-5


class Mel(nn.Module):
    """Logarithm of a mel spectrogram, [batch, samples] -> [batch, bands, samples / hop]."""

    def __init__(self, size: int, hop: int, bands: int, floor: float = 1e-4) -> None:
        super().__init__()
        self._size, self._hop, self._floor = size, hop, floor
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        self.register_buffer("filters", mel_filters(size, bands), persistent=False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """See the class."""
        pad = (self._size - self._hop) // 2
        padded = F.pad(samples, (pad, self._size - self._hop - pad))
        spectrum = torch.stft(
            padded, self._size, self._hop, window=self.window, center=False, return_complex=True
        )
        power = spectrum.real.square() + spectrum.imag.square()
        magnitude = (power + _FLOOR**2).sqrt()
        return (self.filters @ magnitude).clamp(min=self._floor).log()


def mel_filters(size: int, bands: int) -> torch.Tensor:
    """Triangles on the mel scale, each of sum 1, [bands, size // 2 + 1]."""
    top = 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700)
    points = 700 * (10 ** (torch.linspace(0, top, bands + 2) / 2595) - 1)
    bins = torch.linspace(0, SAMPLE_RATE / 2, size // 2 + 1)
    low, middle, high = points[:-2, None], points[1:-1, None], points[2:, None]
    width = SAMPLE_RATE / size
    rising = (bins - low) / (middle - low).clamp(min=width)
    falling = (high - bins) / (high - middle).clamp(min=width)
    filters = torch.minimum(rising, falling).clamp(min=0)
    return filters / filters.sum(dim=1, keepdim=True).clamp(min=1e-3)


class Block(nn.Module):
    """A residual convolution over time that also looks ahead."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.depthwise = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.wide = nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] -> the same."""
        mixed = self.depthwise(hidden.transpose(1, 2)).transpose(1, 2)
        return hidden + self.narrow(F.gelu(self.wide(self.norm(mixed))))


class Encoder(nn.Module):
    """A mel spectrogram at 100 Hz to vectors at the codec's frame rate.

    Args:
        width: Of the vectors.
        stride: Spectra per frame.
    """

    def __init__(self, width: int, stride: int, inner: int = 256, blocks: int = 3) -> None:
        super().__init__()
        bands = 80
        self.mel = Mel(1024, 240, bands)
        self.first = nn.Conv1d(bands, inner, 3, padding=1)
        self.early = nn.Sequential(*(Block(inner) for _ in range(blocks)))
        self.down = nn.Conv1d(inner, inner, stride, stride)
        self.late = nn.Sequential(*(Block(inner) for _ in range(blocks)))
        self.last = nn.Linear(inner, width)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """[batch, samples] of whole frames -> [batch, frames, width]."""
        hidden = self.first(self.mel(samples) / 4 + 1.5)
        hidden = self.early(hidden.transpose(1, 2)).transpose(1, 2)
        return self.last(self.late(self.down(hidden).transpose(1, 2)))


class Quantizer(nn.Module):
    """One codebook, of the running means of what is assigned to its entries."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(size))
        self.register_buffer("total", torch.zeros(size, dim))

    def entries(self) -> torch.Tensor:
        """[size, dim]."""
        return self.total / self.usage.clamp(min=_FLOOR)[:, None]

    def nearest(self, vectors: torch.Tensor) -> torch.Tensor:
        """[n, dim] -> int64 [n]."""
        entries = self.entries()
        return (entries.square().sum(1) - 2 * vectors @ entries.T).argmin(dim=1)

    @torch.no_grad()
    def learn(self, vectors: torch.Tensor, codes: torch.Tensor) -> None:
        """Move the entries to the vectors [n, dim] that are assigned to them by codes [n]."""
        ones = torch.ones_like(codes, dtype=vectors.dtype)
        usage = torch.zeros_like(self.usage).index_add_(0, codes, ones)
        total = torch.zeros_like(self.total).index_add_(0, codes, vectors)
        self.usage.lerp_(usage, 1 - _DECAY)
        self.total.lerp_(total, 1 - _DECAY)
        average = len(vectors) / len(self.usage)
        rare = self.usage < _RARE * average
        heard = vectors[torch.randint(len(vectors), (len(rare),), device=vectors.device)]
        self.usage.copy_(torch.where(rare, average * 0.5, self.usage))
        self.total.copy_(torch.where(rare[:, None], heard * average * 0.5, self.total))


class SplitQuantizer(nn.Module):
    """A codebook for the first code of a frame, then a residual chain for what it leaves.

    Its projections and codebooks become those of the checkpoint's `decoder.quantizer`.
    """

    def __init__(self, width: int, groups: int, size: int) -> None:
        super().__init__()
        dim = width // 2
        self.projections = nn.ModuleDict(
            {
                "rvq_first": nn.ModuleDict(_two_ways(width, dim)),
                "rvq_rest": nn.ModuleDict(_two_ways(width, dim)),
            }
        )
        self.codebooks = nn.ModuleList(Quantizer(size, dim) for _ in range(groups))

    def forward(
        self, vectors: torch.Tensor, kept: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantize.

        Args:
            vectors: [batch, frames, width].
            kept: int64 [batch], how many groups are used of each; None for all. Given in training,
                where the codebooks learn.

        Returns:
            What the codes stand for [batch, frames, width], codes int64 [batch, frames, groups],
            and the loss that keeps vectors near the entries.
        """
        first, rest = self.projections["rvq_first"], self.projections["rvq_rest"]
        batch = len(vectors)
        learning = kept is not None
        if kept is None:
            kept = torch.full((batch,), len(self.codebooks), device=vectors.device)
        near, codes, loss = self._chain(first["in"](vectors), self.codebooks[:1], kept, learning)
        made = first["out"](near)
        others, more, more_loss = self._chain(
            rest["in"](vectors - made.detach()), self.codebooks[1:], kept - 1, learning
        )
        made = made + rest["out"](others) * (kept > 1)[:, None, None]
        return made, torch.cat([codes, more], dim=-1), loss + more_loss

    def _chain(
        self, left: torch.Tensor, codebooks: nn.ModuleList, kept: torch.Tensor, learning: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, frames, dim = left.shape
        made, codes, loss = torch.zeros_like(left), [], left.new_zeros(())
        for index, codebook in enumerate(codebooks):
            flat = left.reshape(-1, dim)
            with torch.no_grad():
                code = codebook.nearest(flat)
            near = codebook.entries()[code].view(batch, frames, dim)
            if learning:
                codebook.learn(flat.detach(), code)
            used = (kept > index)[:, None, None]
            loss = loss + ((left - near.detach()).square() * used).mean()
            made = made + (left + (near - left).detach()) * used
            left = left - near.detach()
            codes.append(code.view(batch, frames))
        return made, torch.stack(codes, dim=-1), loss


def _two_ways(width: int, dim: int) -> dict[str, nn.Linear]:
    return {"in": nn.Linear(width, dim, bias=False), "out": nn.Linear(dim, width, bias=False)}


class SpectrumJudge(nn.Module):
    """A discriminator that sees a complex spectrum as a picture."""

    def __init__(self, size: int, width: int = 24) -> None:
        super().__init__()
        self._size = size
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        norm = nn.utils.parametrizations.weight_norm
        shapes = [(2, (1, 1)), (width, (1, 2)), (width, (1, 2)), (width, (1, 2)), (width, (1, 1))]
        self.layers = nn.ModuleList(
            norm(nn.Conv2d(inner, width, (3, 7), stride, (1, 3))) for inner, stride in shapes
        )
        self.last = norm(nn.Conv2d(width, 1, (3, 3), padding=(1, 1)))

    def forward(self, samples: torch.Tensor) -> list[torch.Tensor]:
        """[batch, samples] -> what each layer makes; the last is the verdict."""
        spectrum = torch.stft(
            samples, self._size, self._size // 4, window=self.window, return_complex=True
        )
        hidden = torch.view_as_real(spectrum).permute(0, 3, 2, 1) / self._size**0.5
        hidden = hidden.contiguous()
        made = []
        for layer in self.layers:
            hidden = F.leaky_relu(layer(hidden), 0.1)
            made.append(hidden)
        made.append(self.last(hidden))
        return made


class Judges(nn.Module):
    """Several of them, at different resolutions."""

    def __init__(self, sizes: tuple[int, ...] = (1536, 768, 384)) -> None:
        super().__init__()
        self.each = nn.ModuleList(SpectrumJudge(size) for size in sizes)

    def forward(self, samples: torch.Tensor) -> list[list[torch.Tensor]]:
        """[batch, samples] -> what each makes."""
        return [judge(samples) for judge in self.each]


class SpectralLoss(nn.Module):
    """Difference of mel spectrograms at several resolutions."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((256, 20), (512, 40), (1024, 80), (2048, 160))
        self.mels = nn.ModuleList(Mel(size, size // 4, bands) for size, bands in shapes)

    def forward(self, made: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Of two sounds, each [batch, samples]."""
        return sum((mel(made) - mel(real)).abs().mean() for mel in self.mels) / len(self.mels)


def judged_real(made: list[list[torch.Tensor]], real: list[list[torch.Tensor]]) -> torch.Tensor:
    """What the discriminators are to make small."""
    pairs = zip(made, real, strict=True)
    return sum((r[-1] - 1).square().mean() + m[-1].square().mean() for m, r in pairs)


def fooled(made: list[list[torch.Tensor]]) -> torch.Tensor:
    """What the decoder is to make small."""
    return sum((layers[-1] - 1).square().mean() for layers in made)


def alike(made: list[list[torch.Tensor]], real: list[list[torch.Tensor]]) -> torch.Tensor:
    """Difference of what the discriminators' layers make."""
    total = made[0][0].new_zeros(())
    for ours, theirs in zip(made, real, strict=True):
        for our, their in zip(ours[:-1], theirs[:-1], strict=True):
            total = total + (our - their.detach()).abs().mean() / their.detach().abs().mean()
    return total / len(made)
