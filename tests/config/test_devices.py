# SPDX-License-Identifier: Apache-2.0
"""Numbering of devices from the user's view to a child process."""

import pytest

from vllm_omni.config.devices import Host, assign_devices, normalize_devices
from vllm_omni.errors import OmniConfigError
from vllm_omni.platforms import current_host, device_environment

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [
        (("0",), None, "0"),
        (("1", "0"), "", "1,0"),
        (("0", "1"), "4, 5", "4,5"),
        (("1",), "GPU-aa,GPU-bb", "GPU-bb"),
    ],
)
def test_indices_count_visible_devices(
    devices: tuple[str, ...], visible: str | None, expected: str
) -> None:
    environ = {} if visible is None else {"SHOWN": visible}
    assert device_environment(devices, variable="SHOWN", environ=environ) == {"SHOWN": expected}


def test_a_cpu_needs_no_environment() -> None:
    assert device_environment(("cpu",)) == {}


def test_a_hidden_device_is_an_error() -> None:
    with pytest.raises(OmniConfigError, match="SHOWN=3 shows only 1"):
        device_environment(("1",), variable="SHOWN", environ={"SHOWN": "3"})


def test_this_host() -> None:
    host = current_host()
    assert (host.device_count == 0) == (host.platform == "cpu")


@pytest.mark.parametrize(("given", "meant"), [("00,1", "0,1"), (["cuda:01", 2], "1,2"), (3, "3")])
def test_one_spelling_of_an_index(given: object, meant: str) -> None:
    """Two stages on one device are seen to be."""
    assert normalize_devices(given) == meant


@pytest.mark.parametrize("given", ["0,１", "٠", "-1", "", "1" * 5000, True, "0.5"])
def test_what_is_no_index(given: object) -> None:
    with pytest.raises(ValueError, match="device indices"):
        normalize_devices(given)


def test_a_cpu_takes_so_many_ranks() -> None:
    host = Host("cpu", 0)
    assert len(assign_devices("cpu", 2, 3, host, "stage 0")) == 2
    with pytest.raises(OmniConfigError, match=r"stage 0: 1 replica.* of 1000000000 rank"):
        assign_devices("cpu", 1, 10**9, host, "stage 0")
