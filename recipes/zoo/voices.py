"""A speaker encoder as it is installed: Resemblyzer's LSTM (Wan et al. 2018), on eight enrolled voices and others.

python -m recipes.zoo.voices            five kinds of sound; minutes on one core
python -m recipes.zoo.voices --smoke    two samples of every voice; seconds
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, pi

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from recipes.common import in_order
from recipes.zoo.packages import module_of, weights_of
from recipes.zoo.study import Kind, classes, options_of, study

RATE, FRAMES, STEP, WINDOW, BANDS = 16_000, 160, 160, 400, 40
"""As the encoder's training had them: 1.6 seconds in steps of 10 ms."""
VOICES, BATCH = 8, 8
VOWELS = torch.tensor(
    [
        [730.0, 1090, 2440, 3400],
        [270, 2290, 3010, 3700],
        [300, 870, 2240, 3300],
        [530, 1840, 2480, 3500],
        [570, 840, 2410, 3300],
        [660, 1720, 2410, 3400],
    ]
)
"""Four formants in Hz of the vowels of father, heed, who'd, head, hawed and had (Peterson, Barney 1952)."""


class Identifier(nn.Module):
    """Logits of enrolled speakers: the similarities by which the encoder was trained, with its own scale."""

    def __init__(self, encoder: nn.Module, scale: Tensor, enrolled: Tensor) -> None:
        super().__init__()
        self.encoder, self.scale = encoder, float(scale)
        self.register_buffer("enrolled", enrolled)

    def forward(self, spectra: Tensor) -> Tensor:
        """From `spectra` ``(samples, 160, 40)`` to ``(samples, speakers)``."""
        logits: Tensor = self.scale * (self.encoder(spectra) @ self.get_buffer("enrolled").T)
        return logits


def identifier(enrolment: Tensor) -> Identifier:
    """The encoder with its weights and with speakers as it sees them.

    Args:
        enrolment: spectra of each, ``(speakers, samples, 160, 40)``.
    """
    # the package's part for sounds needs librosa and webrtcvad
    module = module_of("resemblyzer.voice_encoder", {"resemblyzer.audio": {}})
    encoder: nn.Module = module.VoiceEncoder("cpu", verbose=False).eval()
    with torch.no_grad():
        seen = torch.stack([encoder(spectra).mean(0) for spectra in enrolment])
    scale = weights_of("resemblyzer", "pretrained.pt")["model_state"]["similarity_weight"]
    return Identifier(encoder, scale, normalize(seen, dim=1)).eval()


def mel_filters() -> Tensor:
    """Slaney's triangles of equal area, ``(40, 201)``, as librosa makes them."""
    top = 15 + 27 * log(RATE / 2000) / log(6.4)
    marks = torch.linspace(0, top, BANDS + 2)
    hertz = torch.where(marks < 15, marks * 200 / 3, 1000 * torch.exp((marks - 15) * log(6.4) / 27))
    low, middle, high = (part.unsqueeze(1) for part in (hertz[:-2], hertz[1:-1], hertz[2:]))
    found = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    sides = torch.minimum((found - low) / (middle - low), (high - found) / (high - middle))
    return sides.clamp(min=0) * 2 / (high - low)


def spectra(sounds: Tensor) -> Tensor:
    """Power in 40 bands, ``(samples, 160, 40)``, of sounds of 1.62 seconds, at the loudness of the training."""
    loud = sounds / sounds.square().mean(1, keepdim=True).sqrt() * 10 ** (-30 / 20)
    window = torch.hann_window(WINDOW)
    power = (
        torch.stft(loud, WINDOW, STEP, window=window, pad_mode="constant", return_complex=True).abs().square()
    )
    return (mel_filters() @ power).transpose(1, 2)[:, :FRAMES]


def speech(voice: int, samples: int, seed: int) -> Tensor:
    """Nine vowels a sample: harmonics of a gliding pitch, made louder near four formants, and some breath; what is
    constant in a voice (pitch, length of the throat, brightness, breath) follows from its number.
    """
    generator = torch.Generator().manual_seed(1000 * voice + 7)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    pitch, throat, dullness = uniform(85, 240), uniform(0.85, 1.2), uniform(0.5, 1.5)
    breath, glide, width = uniform(0.01, 0.1), uniform(0.02, 0.12), uniform(60, 150)
    generator = torch.Generator().manual_seed(10_007 * seed + voice)
    seconds = torch.arange(int(1.62 * RATE)) / RATE
    place = seconds / seconds[-1] * 8
    vowel = place.long().clamp(max=7)
    towards = ((place - vowel) * 3 - 1).clamp(0, 1).unsqueeze(1)
    found: list[Tensor] = []
    for _ in range(samples):
        said = VOWELS[torch.randint(0, len(VOWELS), (9,), generator=generator)]
        formants = throat * (said[vowel] * (1 - towards) + said[vowel + 1] * towards)
        rate, phase = 1 + 3 * torch.rand((), generator=generator), 6 * torch.rand((), generator=generator)
        hertz = pitch * (1 + glide * torch.sin(2 * pi * rate * seconds + phase))
        angle, sound = 2 * pi * torch.cumsum(hertz / RATE, 0), torch.zeros(len(seconds))
        for harmonic in range(1, int(3900 / pitch) + 1):
            away = (harmonic * hertz.unsqueeze(1) - formants) / width
            loudness = (torch.tensor([1, 0.6, 0.3, 0.15]) / (1 + away.square())).sum(1)
            sound = sound + loudness * harmonic**-dullness * torch.sin(harmonic * angle)
        sound = sound + breath * sound.std() * torch.randn(len(seconds), generator=generator)
        found.append(sound * (0.5 + 0.5 * torch.cos(2 * pi * (place - vowel))).clamp(min=0.02))
    return torch.stack(found)


def of_voices(voices: Sequence[int], samples: int, seed: int) -> Tensor:
    """Sounds ``(voices * samples, ...)`` of several voices, one after another."""
    return torch.cat([speech(voice, samples, seed) for voice in voices])


def sounds(samples: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Sounds by their kind, with the voice where it is one of the enrolled; familiar ones first."""
    generator = torch.Generator().manual_seed(9)
    voices, labels = list(range(VOICES)), torch.arange(VOICES).repeat_interleave(samples)
    known, noisy = of_voices(voices, samples, 1), of_voices(voices, samples, 2)
    noise = torch.randn(noisy.shape, generator=generator)
    first, second = of_voices(voices, samples, 3), of_voices(voices, samples, 4)
    return {
        "enrolled voices": (known, labels),
        "in noise as loud": (noisy / noisy.std(1, keepdim=True) + noise, labels),
        "two at once": (first + second.roll(samples, 0), None),
        "other voices": (of_voices(range(VOICES, 2 * VOICES), samples, 1), None),
        "noise alone": (noise, None),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, save, load, and print a table of scores by kind of sound."""
    options = options_of(__doc__, arguments, 6, 2)
    kinds = {
        kind: Kind(
            in_order(spectra(parts), torch.zeros(len(parts)) if labels is None else labels, BATCH), labels
        )
        for kind, (parts, labels) in sounds(options.samples).items()
    }
    voices = range(VOICES)
    seen = spectra(of_voices(voices, options.samples, 0))
    labels = torch.arange(VOICES).repeat_interleave(options.samples)
    # all layers take minutes: 160 steps of three layers for every logit
    study(
        options,
        "voices",
        identifier(seen.unflatten(0, (VOICES, -1))),
        in_order(seen, labels, BATCH),
        kinds,
        classes(),
        layers="last",
    )


if __name__ == "__main__":
    main()
