# SPDX-License-Identifier: Apache-2.0
"""Uploaded voices: one safetensors file each, whose header holds what is said about the voice.

Servers may share a folder: of the files, only what is said about the voices is kept in memory, for
as long as the files are the same. A file's name is a digest of the voice's, so no name leads out of
the folder. Files come and go whole; who writes holds the folder's lock.
"""

import fcntl
import hashlib
import os
import stat
import tempfile
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import msgspec
import numpy as np
import regex as re
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from vllm.logger import init_logger

from vllm_omni.errors import OmniClientError, OmniConfigError, OmniGenerateError

logger = init_logger(__name__)

MAX_VOICES = 1000
MAX_NAME = 64
_NAME = re.compile(r"(?!.*\p{Default_Ignorable_Code_Point})[\p{L}\p{N}][\p{L}\p{M}\p{N}_. -]{0,63}")
_ALPHABETS = (re.compile(r"\p{Latin}"), re.compile(r"\p{Cyrillic}"), re.compile(r"\p{Greek}"))
"""Have letters that look alike."""
_Stamp = tuple[int, int, int, int]
_SUFFIX, _LOCK, _RECORD = ".safetensors", ".lock", "voice"
_SAMPLES, _EMBEDDING = "samples", "speaker_embedding"


class VoiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is said about a voice.

    Attributes:
        name: As it was uploaded.
        consent: Who says, or where it says, that the voice may be used.
        created_at: Unix time, s.
        sample_rate: Of the recording, Hz; 0 if there is none but an embedding.
        seconds: Of the recording.
        ref_text: What is said in it.
        speaker_description: In words.
    """

    name: str
    consent: str
    created_at: int
    sample_rate: int = 0
    seconds: float = 0.0
    ref_text: str | None = None
    speaker_description: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """A voice.

    Attributes:
        record: What is said about it.
        samples: float32 [n], mono; None if it has an embedding.
        embedding: float32 [d]; None if it has a recording.
    """

    record: VoiceRecord
    samples: np.ndarray | None = None
    embedding: np.ndarray | None = None


class VoiceNotFoundError(OmniClientError):
    """There is no such voice."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"name: there is no uploaded voice {name[:MAX_NAME]!r}",
            HTTPStatus.NOT_FOUND,
            "NotFoundError",
            param="name",
            code="voice_not_found",
        )


def folded(name: str) -> str:
    """What names are told apart by: without case, and without the forms that a character may have
    (full width, ligatures, ...)."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def is_name(text: str) -> bool:
    """Whether a voice could be called that."""
    name = unicodedata.normalize("NFC", text)
    if sum(alphabet.search(name) is not None for alphabet in _ALPHABETS) > 1:
        return False
    return _NAME.fullmatch(name) is not None and not name.endswith((" ", "."))


def checked_name(name: str) -> str:
    """A voice's name in one spelling of its characters.

    Raises:
        OmniClientError: It is none.
    """
    name = unicodedata.normalize("NFC", name)
    if not is_name(name):
        raise OmniClientError(
            f"name: should be 1 to {MAX_NAME} letters, digits, spaces, or any of _ . - and begin "
            "with a letter or a digit; nothing unseen, and of the Latin, Greek and Cyrillic "
            "alphabets only one",
            param="name",
        )
    return name


class VoiceStore:
    """Voices of a folder. It blocks, so it belongs into a thread; any thread may use it.

    Args:
        folder: Made when it is first written to, for this user alone.
        most: Most voices.
    """

    def __init__(self, folder: Path, most: int = MAX_VOICES) -> None:
        self._folder = folder
        self._most = most
        self._known: dict[Path, tuple[_Stamp, VoiceRecord | None]] = {}
        self._listing = threading.Lock()
        if folder.exists() and not folder.is_dir():
            raise OmniConfigError(f"--custom-voice-dir {folder}: is no folder")

    def records(self) -> list[VoiceRecord]:
        """All voices, by name. Files that have not changed since the last time are not read."""
        with self._listing:  # who comes while another reads them all has little to read
            stamps = self._stamps()
            before, self._known = self._known, {}
            for path, stamp in stamps.items():
                known = before.get(path)
                if known is None or known[0] != stamp:
                    known = stamp, _read_record(path)
                self._known[path] = known
            found = [record for _, record in self._known.values() if record is not None]
        return sorted(found, key=lambda record: record.name.casefold())

    def _stamps(self) -> dict[Path, _Stamp]:
        """What tells whether a file is still the same, of each that there is."""
        stamps = {}
        for path in self._paths():
            try:
                about = path.stat()
            except FileNotFoundError:
                continue  # removed just now
            stamps[path] = (about.st_ino, about.st_ctime_ns, about.st_mtime_ns, about.st_size)
        return stamps

    def get(self, name: str) -> Voice:
        """A voice, its name compared without case.

        Raises:
            VoiceNotFoundError: There is none.
            OmniGenerateError: Its file is broken.
        """
        path = self._path(name)
        try:
            record = _record(path)
            with safe_open(path, framework="numpy") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise VoiceNotFoundError(name) from None
        except (SafetensorError, OSError, msgspec.DecodeError, KeyError) as error:
            raise OmniGenerateError(f"the voice {name!r} cannot be read: {error}") from error
        return Voice(record, tensors.get(_SAMPLES), tensors.get(_EMBEDDING))

    def has(self, name: str) -> bool:
        """Whether there is a voice of that name."""
        return self._path(name).is_file()

    def add(self, voice: Voice) -> None:
        """Keep a voice.

        Raises:
            OmniClientError: There is one of that name already, or there are too many.
            OmniGenerateError: It cannot be written.
        """
        tensors = {_SAMPLES: voice.samples, _EMBEDDING: voice.embedding}
        about = {_RECORD: msgspec.json.encode(voice.record).decode()}
        given = {key: each for key, each in tensors.items() if each is not None}
        data = save(given, about)
        path = self._path(voice.record.name)
        with self._writing():
            if path.exists():
                raise OmniClientError(
                    f"name: there is a voice {voice.record.name!r} already; delete it first",
                    HTTPStatus.CONFLICT,
                    "ConflictError",
                    param="name",
                    code="voice_exists",
                )
            if len(list(self._paths())) >= self._most:
                raise OmniClientError(
                    f"name: there are {self._most} voices already; delete one first",
                    HTTPStatus.CONFLICT,
                    "ConflictError",
                    param="name",
                    code="too_many_voices",
                )
            _write(path, data)

    def delete(self, name: str) -> None:
        """Forget a voice.

        Raises:
            VoiceNotFoundError: There is none.
            OmniGenerateError: It cannot be removed.
        """
        if not self._folder.is_dir():
            raise VoiceNotFoundError(name)
        with self._writing():
            try:
                self._path(name).unlink()
            except FileNotFoundError:
                raise VoiceNotFoundError(name) from None

    def _path(self, name: str) -> Path:
        key = folded(name).encode("utf-8", "surrogatepass")
        return self._folder / (hashlib.sha256(key).hexdigest()[:40] + _SUFFIX)

    def _paths(self) -> Iterator[Path]:
        try:
            yield from self._folder.glob(f"[0-9a-f]*{_SUFFIX}")
        except FileNotFoundError:
            return

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """While one process, and one thread, changes the folder."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)
        except OSError as error:
            raise OmniGenerateError(f"voices cannot be kept: {error.strerror}") from error


def _read_record(path: Path) -> VoiceRecord | None:
    """What is said about a voice; None, and a warning, where a file is none."""
    try:
        return _record(path)
    except FileNotFoundError:
        return None  # removed just now
    except (SafetensorError, OSError, msgspec.DecodeError, KeyError) as error:
        logger.warning("%s is no voice: %s", path, error)
        return None


def _record(path: Path) -> VoiceRecord:
    if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe waits for whoever writes into it
        raise OSError(f"{path} is no file")
    with safe_open(path, framework="numpy") as file:
        about = file.metadata() or {}
    return msgspec.json.decode(about[_RECORD], type=VoiceRecord)


def _write(path: Path, data: bytes) -> None:
    """The whole file, or none."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
