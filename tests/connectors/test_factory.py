# SPDX-License-Identifier: Apache-2.0
"""Connectors by name, and their options out of a YAML's `extra`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_omni.connectors.base import make_key, request_of
from vllm_omni.connectors.factory import OmniConnectorFactory, create_connector
from vllm_omni.connectors.segments import DEPLOYMENT_ID_VARIABLE, new_deployment_id
from vllm_omni.connectors.shm import SharedMemoryConnector
from vllm_omni.errors import OmniConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


@pytest.fixture
def restored_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(OmniConnectorFactory, "_builders", dict(OmniConnectorFactory._builders))
    return


@pytest.mark.parametrize("name", ["SharedMemoryConnector", "shm"])
def test_known_names(name: str, tmp_path: Path) -> None:
    connector = create_connector(name, {"directory": str(tmp_path)}, new_deployment_id())
    assert isinstance(connector, SharedMemoryConnector)
    connector.close()
    assert not list(tmp_path.iterdir())


def test_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(OmniConfigError, match="did you mean 'SharedMemoryConnector'"):
        create_connector("sharedmemoryconector", {}, "d")
    with pytest.raises(OmniConfigError, match=r"known: .*SharedMemoryConnector"):
        create_connector("zzzzzz", {}, "d")


def test_options_apply_and_model_tuning_keys_are_ignored(tmp_path: Path) -> None:
    extra = {
        "inline_small_payloads": True,
        "shm_threshold_bytes": "1024",
        "directory": str(tmp_path),
        "codec_chunk_frames": 25,
        "decode_cudagraph_capture_sizes": [1, 2],
        "connector_get_max_wait": 300,
        "host": "127.0.0.1",
    }
    connector = create_connector("shm", extra, "d")
    result = connector.put("a", "b", make_key("r", "0"), {"x": torch.zeros(8)})
    assert result.handle is not None
    assert result.handle.inline is not None
    large = connector.put("a", "b", make_key("r", "1"), {"x": torch.zeros(512)})
    assert large.handle is not None
    assert large.handle.inline is None
    connector.close()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"shm_threshold_byte": 1}, "did you mean 'shm_threshold_bytes'"),
        ({"inline_small_payload": True}, "did you mean 'inline_small_payloads'"),
        ({"shm_threshold_bytes": -1}, "shm_threshold_bytes"),
        ({"shm_threshold_bytes": "many"}, "shm_threshold_bytes"),
        ({"inline_small_payloads": [1]}, "inline_small_payloads"),
    ],
)
def test_wrong_options(extra: dict[str, object], message: str) -> None:
    with pytest.raises(OmniConfigError, match=message):
        create_connector("shm", extra, "d")


def test_deployment_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extra = {"directory": str(tmp_path)}
    monkeypatch.delenv(DEPLOYMENT_ID_VARIABLE, raising=False)
    with pytest.raises(OmniConfigError, match=DEPLOYMENT_ID_VARIABLE):
        create_connector("shm", extra)
    for bad in ("../x", "a b", "x" * 65, "é"):
        with pytest.raises(OmniConfigError, match="deployment id"):
            create_connector("shm", extra, bad)
    monkeypatch.setenv(DEPLOYMENT_ID_VARIABLE, "from-env")
    create_connector("shm", extra)
    assert [path.name for path in tmp_path.iterdir()] == ["vllm-omni-from-env-lock"]


@pytest.mark.usefixtures("restored_registry")
def test_out_of_tree_connector() -> None:
    made = []

    def build(extra: object, deployment_id: str | None) -> SharedMemoryConnector:
        made.append((extra, deployment_id))
        return SharedMemoryConnector(deployment_id)

    OmniConnectorFactory.register("Mine", build, aliases=("m",))
    OmniConnectorFactory.register("Mine", build)
    create_connector("m", {"speed": 1}, "d").close()
    assert made == [({"speed": 1}, "d")]
    with pytest.raises(OmniConfigError, match="taken"):
        OmniConnectorFactory.register("shm", build)


def test_keys_carry_any_request_id() -> None:
    for request_id in ("r", "a/b", "", "/", "r/0", "é\ud800"):
        assert request_of(make_key(request_id, "hidden.0")) == request_id
    for bad in ("", "a/b"):
        with pytest.raises(ValueError, match="suffix"):
            make_key("r", bad)
    for bad in ("r", "r/"):
        with pytest.raises(ValueError, match="make_key"):
            request_of(bad)
