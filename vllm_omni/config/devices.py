# SPDX-License-Identifier: Apache-2.0
"""Which devices the replicas of a stage run on."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni.errors import OmniConfigError


@dataclass(frozen=True, slots=True)
class Host:
    """What planning needs to know about this machine.

    Attributes:
        platform: `cpu`, `cuda`, `rocm`, `npu`, `xpu` or `musa`; key of `platforms:` overlays.
        device_count: Accelerators that this process may see.
    """

    platform: str
    device_count: int

    @classmethod
    def current(cls) -> "Host":
        """This machine, as vLLM sees it."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu() or current_platform.is_unspecified():
            return cls("cpu", 0)
        name = "rocm" if current_platform.is_rocm() else current_platform.device_name
        return cls(name, current_platform.device_count())


MOST_CPU_RANKS = 1024
"""Of all replicas of a stage together."""
_INDEX = re.compile("[0-9]{1,9}")


def normalize_devices(value: Any) -> Any:
    """`devices` in canonical form: `"0,1"` or `"cpu"`. Takes an index or a list of them, too."""
    if isinstance(value, bool):
        raise ValueError('should be device indices such as "0,1", or cpu')
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    names = [str(item).strip().lower() for item in items]
    names = [name.rpartition(":")[2] if ":" in name else name for name in names]
    if not names or not all(name == "cpu" or _INDEX.fullmatch(name) for name in names):
        raise ValueError('should be device indices such as "0,1", or cpu')
    if "cpu" in names and set(names) != {"cpu"}:
        raise ValueError("mixes cpu with device indices")
    return "cpu" if "cpu" in names else ",".join(str(int(name)) for name in names)


def assign_devices(
    devices: str, num_replicas: int, world_size: int, host: Host, where: str
) -> tuple[tuple[str, ...], ...]:
    """The devices of each replica, one per rank; those on a CPU share all of its cores.

    Args:
        devices: In canonical form.
        num_replicas: Copies of the stage.
        world_size: Devices that one replica needs.
        host: The machine.
        where: Names the stage in errors.

    Raises:
        OmniConfigError: They do not exist, or do not match the number of replicas.
    """
    if devices == "cpu":
        if num_replicas * world_size > MOST_CPU_RANKS:
            raise OmniConfigError(
                f"{where}: {num_replicas} replica(s) of {world_size} rank(s) are more than the "
                f"{MOST_CPU_RANKS} processes that one CPU is given"
            )
        return (("cpu",) * world_size,) * num_replicas
    names = devices.split(",")
    _check_exist(names, host, where)
    if len(names) % num_replicas:
        raise OmniConfigError(
            f"{where}: num_replicas = {num_replicas} cannot share the {len(names)} device(s) "
            f'"{devices}" equally; name {num_replicas * world_size}'
        )
    share = len(names) // num_replicas
    if share < world_size:
        raise OmniConfigError(
            f"{where}: each of {num_replicas} replica(s) needs {world_size} device(s) and has "
            f'{share} of "{devices}"'
        )
    groups = tuple(tuple(names[i : i + share]) for i in range(0, len(names), share))
    for group in groups:
        if len(set(group)) != len(group):
            raise OmniConfigError(f'{where}: devices = "{devices}" names a device twice')
    return tuple(group[:world_size] for group in groups)


def _check_exist(names: Sequence[str], host: Host, where: str) -> None:
    wanted = '"' + ",".join(names) + '"'
    if host.platform == "cpu":
        raise OmniConfigError(
            f"{where}: devices = {wanted}, but this host has no accelerator; "
            "write devices: cpu (or give the file a `platforms: cpu:` overlay)"
        )
    if max(map(int, names)) >= host.device_count:
        raise OmniConfigError(
            f"{where}: devices = {wanted}, but this host has {host.device_count} device(s), "
            f"counted from 0; move the stage with `devices` in the deploy file or "
            "--stage-overrides"
        )
