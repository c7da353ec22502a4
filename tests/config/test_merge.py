# SPDX-License-Identifier: Apache-2.0
"""Merges: associative, with a neutral element, idempotent, and they leave their arguments alone."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.config.merge import (
    DEEP_KEYS,
    Layer,
    deep_merge,
    fold,
    merge_deploy,
    merge_stage,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = st.integers() | st.text(max_size=3) | st.booleans()
# A name holds either values or mappings, never both, as in a schema.
TREES = st.recursive(
    st.dictionaries(NAMES.map("v_{}".format), SCALARS),
    lambda inner: (
        st.dictionaries(NAMES.map("m_{}".format), inner)
        | st.dictionaries(NAMES.map("v_{}".format), SCALARS)
    ),
    max_leaves=8,
)
STAGE = st.fixed_dictionaries(
    {},
    optional={
        "devices": st.sampled_from(["0", "1", None]),
        "max_num_seqs": st.integers(1, 9),
        "env": st.dictionaries(NAMES, st.text(max_size=2)),
        "default_sampling_params": st.none() | TREES,
        "engine_extras": st.none() | TREES,
    },
)
STAGES = st.dictionaries(st.integers(0, 3), STAGE, max_size=3).map(
    lambda by_id: [{"stage_id": i, **values} for i, values in by_id.items()]
)
CONNECTORS = st.dictionaries(
    NAMES, st.fixed_dictionaries({"name": st.just("Shm")}, optional={"extra": TREES}), max_size=2
)
OVERLAY = st.fixed_dictionaries(
    {}, optional={"dtype": st.sampled_from(["half", None]), "stages": st.none() | STAGES}
)
DEPLOY = st.fixed_dictionaries(
    {},
    optional={
        "async_chunk": st.booleans(),
        "dtype": st.sampled_from(["half", "float", None]),
        "connectors": st.none() | CONNECTORS,
        "stages": st.none() | STAGES,
        "platforms": st.none() | st.dictionaries(st.sampled_from(["cpu", "cuda"]), OVERLAY),
        "stage_overrides": st.none() | st.dictionaries(NAMES, STAGE, max_size=2),
    },
)


def by_id(deploy: Any) -> Any:
    """Equality up to the order of stages, and up to null and absence of a mapping."""
    if not isinstance(deploy, dict):
        return deploy
    plain = {k: by_id(v) for k, v in deploy.items() if k != "stages"}
    stages = {s["stage_id"]: by_id(s) for s in deploy.get("stages") or ()}
    plain["stages"] = {i: stage for i, stage in stages.items() if len(stage) > 1}
    return {k: v for k, v in plain.items() if v not in (None, {}, [])}


@pytest.mark.parametrize(
    ("merge", "values"), [(deep_merge, TREES), (merge_stage, STAGE), (merge_deploy, DEPLOY)]
)
@settings(deadline=None)
@given(data=st.data())
def test_laws(merge: Any, values: Any, data: st.DataObject) -> None:
    a, b, c = (data.draw(values) for _ in range(3))
    before = copy.deepcopy((a, b, c))
    assert by_id(merge(merge(a, b), c)) == by_id(merge(a, merge(b, c)))
    assert by_id(merge(a, {})) == by_id(a) == by_id(merge({}, a))
    assert by_id(merge(a, a)) == by_id(a)
    assert (a, b, c) == before


@settings(deadline=None)
@given(layers=st.lists(STAGE, max_size=5))
def test_the_last_layer_that_gives_a_value_wins(layers: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(layers)
    settings = fold([Layer(f"layer {i}: {{key}}", values) for i, values in enumerate(layers)])
    assert layers == before
    for key in {key for values in layers for key in values}:
        given = [(i, v[key]) for i, v in enumerate(layers) if v.get(key) is not None]
        if key in DEEP_KEYS:
            given = [(i, value) for i, value in given if value]
        if not given:
            assert key not in settings
            continue
        position, value = given[-1]
        assert settings[key].source == f"layer {position}: {key}"
        if key in DEEP_KEYS:
            assert deep_merge(settings[key].value, value) == settings[key].value
        else:
            assert settings[key].value == value


def test_a_file_over_its_base() -> None:
    base = {
        "dtype": "half",
        "connectors": {"shm": {"name": "Shm", "extra": {"a": 1, "b": 2}}},
        "stages": [
            {"stage_id": 0, "env": {"A": "1"}, "default_sampling_params": {"seed": 1, "top_k": 2}},
            {"stage_id": 1},
        ],
    }
    over = {
        "dtype": "float",
        "connectors": {"shm": {"extra": {"b": 3}}},
        "stages": [
            {"stage_id": 0, "env": {"B": "2"}, "default_sampling_params": {"seed": 5}},
            {"stage_id": 2},
        ],
    }
    assert merge_deploy(base, over) == {
        "dtype": "float",
        "connectors": {"shm": {"name": "Shm", "extra": {"a": 1, "b": 3}}},
        "stages": [
            {"stage_id": 0, "env": {"B": "2"}, "default_sampling_params": {"seed": 5, "top_k": 2}},
            {"stage_id": 1},
            {"stage_id": 2},
        ],
    }
