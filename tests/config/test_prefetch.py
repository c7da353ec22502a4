# SPDX-License-Identifier: Apache-2.0
"""Checkpoints fetched from the hub before stages start (row A-81), from a hub on this machine."""

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from vllm.transformers_utils import repo_utils

from tests.helpers.fake_hub import COMMIT, FakeHub, use
from vllm_omni.config.checkpoint import load_hf_config
from vllm_omni.config.prefetch import Checkpoint, checkpoints, fetch, node_lock
from vllm_omni.config.prefetch import lock as lock_module
from vllm_omni.config.prefetch import snapshot as snapshot_module
from vllm_omni.config.prefetch.snapshot import IncompleteError, verify
from vllm_omni.errors import OmniConfigError

from .conftest import Planner

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

CONFIG = b'{"model_type": "qwen2"}'
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
TEXT = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ x }}",
}
MODEL_INDEX = json.dumps(
    {
        "_class_name": "StableDiffusionPipeline",
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "safety_checker": [None, None],
    }
).encode()
REPOS = {
    "toy/ar": {
        **TEXT,
        "model.safetensors.index.json": INDEX,
        **{name: name.encode() for name in SHARDS},
        "consolidated.safetensors": b"twice",
        "original/model.safetensors": b"twice",
        "pytorch_model.bin": b"pickle",
        "model.onnx": b"other",
        "modeling_toy.py": b"code",
        "README.md": b"words",
        "logo.png": b"picture",
    },
    "toy/one": {**TEXT, "model.safetensors": b"weights"},
    "toy/pickles": {**TEXT, "pytorch_model.bin": b"pickle"},
    "toy/empty": {"README.md": b"words"},
    "toy/diffusers": {
        "model_index.json": MODEL_INDEX,
        "toy.safetensors": b"all in one file",
        "vae/config.json": CONFIG,
        "vae/diffusion_pytorch_model.safetensors": b"vae",
        "vae/diffusion_pytorch_model.fp16.safetensors": b"twice",
        "vae/diffusion_pytorch_model.bin": b"pickle",
        "text_encoder/config.json": CONFIG,
        "text_encoder/model.safetensors.index.json": INDEX,
        **{f"text_encoder/{name}": name.encode() for name in SHARDS},
        "text_encoder/model.safetensors.index.fp16.json": INDEX,
        "text_encoder/model.onnx": b"other",
        "tokenizer/vocab.json": b"{}",
        "safety_checker/model.safetensors": b"not used",
        "vae_1_0/diffusion_pytorch_model.safetensors": b"not named",
        "README.md": b"words",
    },
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """The hub of this process, with an empty cache."""
    with FakeHub(REPOS).running() as fake:
        use(fake, tmp_path / "hub", monkeypatch)
        yield fake


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited between attempts, in place of waiting."""
    seconds: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=seconds.append)
    monkeypatch.setattr(snapshot_module, "time", clock)
    return seconds


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def of(model: str, **settings: Any) -> Checkpoint:
    return Checkpoint(model=model, **settings)


def test_an_ar_checkpoint_comes_without_what_nobody_reads(hub: FakeHub) -> None:
    folder = fetch(of("toy/ar"))
    wanted = sorted({*TEXT, *SHARDS, "model.safetensors.index.json"})
    assert hub.downloads == wanted
    assert folder.name == COMMIT
    assert {name: (folder / name).read_bytes() for name in SHARDS} == {
        name: name.encode() for name in SHARDS
    }
    fetch(of("toy/ar"))
    assert hub.downloads == wanted, "nothing is downloaded twice"


def test_a_diffusers_checkpoint_comes_with_the_folders_of_its_index(hub: FakeHub) -> None:
    fetch(of("toy/diffusers"))
    assert hub.downloads == sorted(
        [
            "model_index.json",
            "vae/config.json",
            "vae/diffusion_pytorch_model.safetensors",
            "text_encoder/config.json",
            "text_encoder/model.safetensors.index.json",
            *(f"text_encoder/{name}" for name in SHARDS),
            "tokenizer/vocab.json",
        ]
    )


def test_random_weights_need_no_download(hub: FakeHub) -> None:
    fetch(of("toy/diffusers", weights=False))
    assert not [name for name in hub.downloads if name.endswith(".safetensors")]
    assert "vae/config.json" in hub.downloads


def test_pickles_and_code_take_trust(hub: FakeHub) -> None:
    with pytest.raises(OmniConfigError, match=r"'toy/pickles'.*--trust-remote-code"):
        fetch(of("toy/pickles"))
    fetch(of("toy/pickles", trusted=True))
    assert "pytorch_model.bin" in hub.downloads
    hub.requests.clear()
    fetch(of("toy/ar", trusted=True))
    assert "modeling_toy.py" in hub.downloads and "pytorch_model.bin" not in hub.downloads


def test_a_complete_cache_needs_no_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(of("toy/ar"))
    hub.requests.clear()
    offline(monkeypatch)
    assert fetch(of("toy/ar")) == folder
    assert hub.requests == []
    # As an older library leaves it, and with a file gone that nothing needs.
    (folder / "merges.txt").unlink()
    assert fetch(of("toy/ar")) == folder
    for tree in (folder.parents[1] / "trees").iterdir():
        tree.unlink()
    assert fetch(of("toy/ar")) == folder


def test_a_complete_cache_does_when_the_hub_is_down(hub: FakeHub, slept: list[float]) -> None:
    folder = fetch(of("toy/diffusers"))
    hub.fault = lambda path: (418, {})
    assert fetch(of("toy/diffusers")) == folder
    assert slept == []


@pytest.mark.parametrize("model", ["toy/ar", "toy/diffusers"])
def test_an_incomplete_cache_is_told_offline(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, slept: list[float], model: str
) -> None:
    folder = fetch(of(model))
    offline(monkeypatch)
    shard = next(folder.rglob(SHARDS[1]))
    shard.resolve().unlink()
    with pytest.raises(OmniConfigError) as told:
        fetch(of(model))
    for part in (model, SHARDS[1], "HF_HUB_OFFLINE", f"hf download {model}"):
        assert part in str(told.value)
    assert slept == []


def test_a_passing_failure_is_tried_again(hub: FakeHub, slept: list[float]) -> None:
    left = [2]

    def fault(path: str) -> tuple[int, dict[str, str]] | None:
        if not path.endswith(SHARDS[0]) or not left[0]:
            return None
        left[0] -= 1
        return 418, {}

    hub.fault = fault
    fetch(of("toy/ar"))
    assert slept == [1.0, 2.0]


def test_a_lasting_failure_is_told_after_three_attempts(hub: FakeHub, slept: list[float]) -> None:
    hub.fault = lambda path: (418, {})
    with pytest.raises(OmniConfigError, match=r"'toy/one'.* 3 attempts: .*418.*HF_ENDPOINT"):
        fetch(of("toy/one"))
    assert slept == [1.0, 2.0]


@pytest.mark.parametrize(
    "status, code, told",
    [
        (401, "GatedRepo", "HF_TOKEN"),
        (403, "GatedRepo", "accept its terms"),
        (403, "", "HF_TOKEN"),
        (401, "RepoNotFound", "private"),
        (404, "RepoNotFound", "check the name"),
        (404, "RevisionNotFound", "no revision 'v2'"),
    ],
)
def test_what_stays_refused_is_asked_for_once(
    hub: FakeHub, slept: list[float], status: int, code: str, told: str
) -> None:
    hub.fault = lambda path: (status, {"X-Error-Code": code} if code else {})
    with pytest.raises(OmniConfigError, match=told) as error:
        fetch(of("toy/one", revision="v2"))
    assert "'toy/one'" in str(error.value)
    assert len(hub.requests) == 1 and slept == []


def test_what_is_not_cached_is_told_offline(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    offline(monkeypatch)
    with pytest.raises(OmniConfigError, match=r"'toy/one'.*HF_HUB_OFFLINE.*hf download toy/one"):
        fetch(of("toy/one"))
    assert hub.requests == [] and slept == []


@pytest.mark.parametrize("model", ["toy/empty", "no such folder", "a/b/c"])
def test_what_is_no_checkpoint_is_told(hub: FakeHub, slept: list[float], model: str) -> None:
    with pytest.raises(OmniConfigError, match=f"'{model}'"):
        fetch(of(model))
    assert slept == []


def unreachable(*args: Any) -> None:
    huggingface_hub.get_session().get("http://127.0.0.1:1")


def test_a_hub_that_cannot_be_reached_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slept: list[float]
) -> None:
    nowhere = FakeHub({})
    with nowhere.running():
        pass
    use(nowhere, tmp_path, monkeypatch)
    with pytest.raises(OmniConfigError, match=r"'toy/one'.*3 attempts.*hf download toy/one"):
        fetch(of("toy/one"))
    assert slept == [1.0, 2.0]
    # Its config is asked for before; what the hub's library raises comes through vLLM.
    monkeypatch.setattr(repo_utils, "file_or_path_exists", unreachable)
    with pytest.raises(OmniConfigError, match=r"'toy/one'.* the hub cannot be reached"):
        load_hf_config("toy/one")


def test_a_snapshot_has_a_file_for_each_pattern(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="no folder"):
        verify(tmp_path / "none", ["*"])
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "model.safetensors").write_bytes(b"")
    verify(tmp_path, ["*.safetensors", "vae/*"])
    with pytest.raises(IncompleteError, match=r"\*\.json"):
        verify(tmp_path, ["*.safetensors", "*.json"])
    for whole in ("*", "**", "./*", "**/*"):
        with pytest.raises(IncompleteError, match=r"none of config\.json"):
            verify(tmp_path, [whole])
    (tmp_path / "processor_config.json").symlink_to(tmp_path / "gone")
    with pytest.raises(IncompleteError):
        verify(tmp_path, ["*"])
    (tmp_path / "gone").write_bytes(b"")
    verify(tmp_path, ["*", "**", "./*", "**/*"])


def test_lock_folders_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"HF_HOME": "hf", "XDG_CACHE_HOME": "xdg", "HOME": "home"}
    for variable, name in places.items():
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    last = tmp_path / "last"
    monkeypatch.setattr(lock_module, "LAST_RESORT", last)
    leaf = "locks/vllm-omni-weight-prefetch"
    expected = {"hf": leaf, "xdg": f"huggingface/{leaf}", "home": f".cache/huggingface/{leaf}"}
    for name, rest in expected.items():
        assert lock_module.lock_folder() == tmp_path / name / rest
        # A file where a folder should be keeps root out too.
        (tmp_path / name).rename(tmp_path / f"{name}.old")
        (tmp_path / name).write_bytes(b"")
    assert lock_module.lock_folder() == last
    last.rmdir()
    last.write_bytes(b"")
    assert lock_module.lock_folder() is None


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where locks are, with a short time between two tries."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "locks" / "vllm-omni-weight-prefetch"


def go_on() -> None:
    """A check that never ends the wait."""


def take(model: str = "toy/one", **settings: Any) -> AbstractContextManager[None]:
    return node_lock(model, go_on, **{"poll": 0.01, **settings})


def fail_flock(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def spawn(target: Callable[..., None], *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    process.start()
    return process


def note_turns(log: Path) -> None:
    for _ in range(5):
        with take():
            for word in ("in", "out"):
                with log.open("a") as file:
                    file.write(f"{os.getpid()} {word}\n")
                time.sleep(0.005)


@pytest.mark.parametrize("number", [None, errno.ENOLCK])
def test_one_process_at_a_time(
    locks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    if number is not None:
        fail_flock(monkeypatch, number)
    log = tmp_path / "log"
    processes = [spawn(note_turns, log) for _ in range(3)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    lines = log.read_text().split("\n")[:-1]
    assert len(lines) == 30
    for entered, left in zip(lines[::2], lines[1::2], strict=True):
        assert (entered.split()[1], left.split()[1]) == ("in", "out")
        assert entered.split()[0] == left.split()[0]
    assert [path.name for path in locks.iterdir()] == ["toy__one.lock"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EACCES, errno.EINVAL])
def test_where_there_is_no_flock_a_folder_is_the_lock(
    locks: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_flock(monkeypatch, number)
    with take("org/name"):
        assert (locks / "org__name.lock.d").is_dir()
    assert not (locks / "org__name.lock.d").exists()


def hold(started: Any) -> None:
    with take():
        started.set()
        signal.pause()


def test_a_lock_ends_with_its_holder(locks: Path) -> None:
    started = multiprocessing.get_context("fork").Event()
    holder = spawn(hold, started)
    assert started.wait(60)
    tries = 0

    class Stop(BaseException):
        pass

    def check() -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            raise Stop

    with pytest.raises(Stop), node_lock("toy/one", check, timeout=0, poll=0.01):
        raise AssertionError("it is held, and waited for beyond the timeout of a folder")
    with take("toy/other"):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    with take():
        pass
    holder.join()


def test_a_folder_that_was_left_is_waited_for_only_so_long(
    locks: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_flock(monkeypatch, errno.ENOLCK)
    left = locks / "toy__one.lock.d"
    left.mkdir(parents=True)
    with caplog.at_level(logging.WARNING), take(timeout=0.03):
        pass
    assert "without a lock" in caplog.text and str(left) in caplog.text
    assert left.is_dir(), "it may be someone's"


def test_no_folder_for_locks_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock_module, "lock_folder", lambda: None)
    with caplog.at_level(logging.WARNING), take():
        pass
    assert "without a lock" in caplog.text


def test_other_errors_of_the_lock_are_told(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_flock(monkeypatch, errno.EIO)
    with pytest.raises(OmniConfigError, match=r"'toy/one'.*toy__one\.lock.*HF_HOME"), take():
        pass


def test_a_plan_says_what_is_fetched(plan: Planner, checkpoint: str) -> None:
    resolved = plan(cli={"load_format": "dummy", "download_dir": "/somewhere"})
    assert checkpoints(resolved) == (), "a folder needs nothing"
    thinker, talker, decoder = resolved.stages
    assert decoder.diffusion is not None
    stages = (
        replace(
            thinker,
            engine_args={**thinker.engine_args, "model": "toy/ar", "tokenizer": "toy/tokens"},
        ),
        replace(
            talker,
            engine_args={**talker.engine_args, "model": "toy/ar", "load_format": "safetensors"},
        ),
        replace(decoder, diffusion=replace(decoder.diffusion, model="toy/decoder")),
    )
    assert checkpoints(replace(resolved, stages=stages)) == (
        Checkpoint(model="toy/ar", cache_dir="/somewhere", weights=True),
        Checkpoint(model="toy/tokens", weights=False),
        Checkpoint(model="toy/decoder", weights=False),
    )
    remote = replace(
        decoder, diffusion=replace(decoder.diffusion, model="s3://bucket/x", revision="v1")
    )
    assert checkpoints(replace(resolved, stages=(remote,))) == ()
