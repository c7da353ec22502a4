# SPDX-License-Identifier: Apache-2.0
"""espeak-ng inside of the process (the library of the package `espeakng-loader`)."""

import ctypes

import espeakng_loader
import numpy as np
from scipy.signal import resample_poly

from recipes.demo.tts.voices import Voice

SAMPLE_RATE = 24_000
_RETRIEVAL = 1
_CHARACTERS = 1
_UTF8 = 1
_RATE, _PITCH = 1, 3
_ESPEAK_RATE = 22_050
_UP, _DOWN = 160, 147
_AUDIBLE = 0.004
_LEAD = SAMPLE_RATE * 4 // 100
_TAIL = SAMPLE_RATE * 12 // 100
_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class Speaker:
    """The library, once per process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        rate = self._library.espeak_Initialize(
            _RETRIEVAL, 0, espeakng_loader.get_data_path().encode(), 0
        )
        assert rate == _ESPEAK_RATE, rate
        self._chunks: list[np.ndarray] = []
        self._callback = _Callback(self._take)
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _events: int) -> int:
        if samples and count > 0:
            self._chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: Voice) -> np.ndarray:
        """Speech, float32 [samples] at 24 kHz; silence around it is cut to a constant length.

        Raises:
            ValueError: espeak-ng has no such voice, or nothing was heard.
        """
        self._chunks.clear()
        library = self._library
        if library.espeak_SetVoiceByName(voice.espeak.encode()) != 0:
            raise ValueError(f"no voice {voice.espeak!r}")
        library.espeak_SetParameter(_RATE, voice.speed, 0)
        library.espeak_SetParameter(_PITCH, voice.pitch, 0)
        spoken = text.encode()
        library.espeak_Synth(spoken, len(spoken) + 1, 0, _CHARACTERS, 0, _UTF8, None, None)
        library.espeak_Synchronize()
        if not self._chunks:
            raise ValueError(f"no sound of {text!r}")
        whole = np.concatenate(self._chunks).astype(np.float32) * (voice.gain / 32768)
        return _trimmed(resample_poly(whole, _UP, _DOWN).astype(np.float32), text)


def _trimmed(samples: np.ndarray, text: str) -> np.ndarray:
    loud = np.flatnonzero(np.abs(samples) > _AUDIBLE)
    if len(loud) == 0:
        raise ValueError(f"no sound of {text!r}")
    padded = np.pad(samples, (_LEAD, _TAIL))
    return padded[loud[0] : loud[-1] + _LEAD + _TAIL]
