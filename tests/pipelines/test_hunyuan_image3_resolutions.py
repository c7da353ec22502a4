# SPDX-License-Identifier: Apache-2.0
"""The sizes that HunyuanImage-3 paints, and the tokens that name them (row A-76)."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.pipelines.hunyuan_image3 import resolutions
from vllm_omni.pipelines.hunyuan_image3.resolutions import (
    EXTRA_RESOLUTIONS,
    Resolution,
    ResolutionGroup,
    get_cached_resolution_group,
    size_named_by,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]
SQUARES = ["512x512", "640x640", "768x768", "896x896"]
NEW_SHAPES = ["1024x768", "1280x720", "768x1024", "720x1280"]


@pytest.fixture(scope="module")
def group() -> ResolutionGroup:
    return ResolutionGroup()


class TestTrainedBuckets:
    def test_there_are_33_for_the_default_base(self) -> None:
        group = ResolutionGroup(extra_resolutions=())
        assert group.base_size == 1024
        assert len(group) == group.trained == 33

    @pytest.mark.parametrize(
        ("index", "size"),
        [
            *((0, "512x2048"), (8, "512x1536"), (15, "960x1088"), (16, "1024x1024")),
            *((17, "1088x960"), (24, "1536x512"), (32, "2048x512")),
        ],
    )
    def test_what_they_are(self, group: ResolutionGroup, index: int, size: str) -> None:
        assert str(group[index]) == size

    def test_they_rise_in_ratio_each_once(self, group: ResolutionGroup) -> None:
        ratios = [group[i].ratio for i in range(33)]
        assert ratios == sorted(set(ratios))

    def test_they_are_symmetric(self, group: ResolutionGroup) -> None:
        for i in range(33):
            assert (group[i].height, group[i].width) == (group[32 - i].width, group[32 - i].height)

    @pytest.mark.parametrize("base", [256, 512, 1024, 1040, 2048])
    def test_all_sides_are_multiples_of_16(self, base: int) -> None:
        group = ResolutionGroup(base, extra_resolutions=())
        assert len(group) == 33
        assert str(group[16]) == f"{base}x{base}"
        for size in group.data:
            assert size.height % 16 == 0 and size.width % 16 == 0
            assert base / 2 - 16 < min(size.height, size.width)
            assert max(size.height, size.width) <= 2 * base

    @pytest.mark.parametrize("base", [0, -16, 15, 1000])
    def test_other_bases_are_refused(self, base: int) -> None:
        with pytest.raises(ValueError, match="image_base_size"):
            ResolutionGroup(base)


class TestExtraResolutions:
    def test_new_shapes_come_behind_the_trained_ones(self, group: ResolutionGroup) -> None:
        assert len(group) == 37
        assert [str(group[i]) for i in range(33, 37)] == NEW_SHAPES

    def test_the_square_has_four_more_sizes(self, group: ResolutionGroup) -> None:
        assert [str(size) for size in group[16].extra_res] == SQUARES
        assert not any(group[i].extra_res for i in range(37) if i != 16)

    def test_no_shape_is_there_twice(self, group: ResolutionGroup) -> None:
        assert len({size.ratio for size in group.data}) == 37

    def test_a_size_is_added_once(self) -> None:
        group = ResolutionGroup(1024, ["512x512", "512x512", "1024x1024", "1024x768", "1024x768"])
        assert len(group) == 34
        assert [str(size) for size in group[16].extra_res] == ["512x512"]

    def test_an_extra_size_of_a_new_shape_has_extras_too(self) -> None:
        group = ResolutionGroup(1024, ["1024x768", "512x384"])
        assert [str(size) for size in group[33].extra_res] == ["512x384"]

    def test_another_base_keeps_its_square(self) -> None:
        group = ResolutionGroup(512)
        assert [str(size) for size in group[16].extra_res] == SQUARES[1:]


class TestResolution:
    @pytest.mark.parametrize("size", ["480x640", "480X640", (480, 640), [480, 640]])
    def test_height_comes_first(self, size) -> None:
        assert (Resolution(size).height, Resolution(size).width) == (480, 640)

    @pytest.mark.parametrize("size", [512, "512", (512,)])
    def test_one_number_is_a_square(self, size) -> None:
        assert Resolution(size) == Resolution("512x512")

    @pytest.mark.parametrize("size", ["", "x", "1x", "ax2", "1x2x3", "-1x5", 0, -3, (), (1, 2, 3)])
    def test_what_is_none(self, size) -> None:
        with pytest.raises(ValueError, match="a resolution"):
            Resolution(size)

    def test_repr_lists_the_extra_ones(self, group: ResolutionGroup) -> None:
        assert repr(Resolution(512)) == "Resolution(512x512)"
        assert repr(group[16]) == f"Resolution(1024x1024, extra_res=[{', '.join(SQUARES)}])"
        assert repr(group[16]) in repr(group)

    @pytest.mark.parametrize(
        ("side", "expected"),
        [(256, 512), (400, 512), (700, 640), (800, 768), (1000, 1024), (5000, 1024)],
    )
    def test_match_is_nearest_in_area(self, group, side: int, expected: int) -> None:
        assert group[16].match(side, side) == (expected, expected)

    def test_match_says_width_first(self, group: ResolutionGroup) -> None:
        assert group[33].match(1, 1) == (768, 1024)
        assert group[0].match(2048, 512) == (2048, 512)

    def test_equality(self) -> None:
        assert Resolution(512) == Resolution((512, 512)) != Resolution((512, 640))
        assert len({Resolution(512), Resolution("512"), Resolution(640)}) == 2
        assert Resolution(512) != "512x512"


class TestTargetSize:
    @pytest.mark.parametrize(
        ("width", "height", "expected"),
        [
            (1024, 1024, (1024, 1024)),
            (500, 500, (512, 512)),
            (768, 1024, (768, 1024)),
            (720, 1280, (720, 1280)),
            (1920, 1080, (1280, 720)),
            (1080, 1920, (720, 1280)),
            (4000, 3000, (1024, 768)),
            (10_000, 100, (2048, 512)),
            (100, 10_000, (512, 2048)),
        ],
    )
    def test_shape_first_then_area(self, group, width: int, height: int, expected) -> None:
        assert group.get_target_size(width, height) == expected

    @given(st.integers(1, 8192), st.integers(1, 8192))
    def test_it_is_a_known_size_of_the_nearest_shape(self, width: int, height: int) -> None:
        group = get_cached_resolution_group()
        found_width, found_height = group.get_target_size(width, height)
        known = {str(size) for bucket in group.data for size in (bucket, *bucket.extra_res)}
        assert f"{found_height}x{found_width}" in known
        best = min(abs(bucket.ratio - height / width) for bucket in group.data)
        assert abs(found_height / found_width - height / width) == pytest.approx(best)

    @given(st.integers(0, 36))
    def test_a_known_size_is_kept(self, index: int) -> None:
        size = get_cached_resolution_group()[index]
        assert get_cached_resolution_group().get_target_size(size.width, size.height) == (
            size.width,
            size.height,
        )


class TestCache:
    def test_who_asks_gets_the_same_group(self) -> None:
        assert get_cached_resolution_group(1024) is get_cached_resolution_group(1024)
        assert get_cached_resolution_group(512) is not get_cached_resolution_group(1024)

    def test_it_is_bounded(self) -> None:
        assert get_cached_resolution_group.cache_parameters()["maxsize"] == 4


class TestRatioTokens:
    @pytest.mark.parametrize(
        ("token", "size"),
        [
            *((128_044, (512, 2048)), (128_060, (1024, 1024)), (128_076, (2048, 512))),
            *((130_103, (1024, 768)), (130_104, (1280, 720))),
            *((130_105, (768, 1024)), (130_106, (720, 1280))),
        ],
    )
    def test_what_they_name(self, token: int, size: tuple[int, int]) -> None:
        assert size_named_by(token, (64, 32)) == size

    def test_each_names_its_bucket(self, group: ResolutionGroup) -> None:
        tokens = [*range(128_044, 128_077), *range(130_103, 130_107)]
        assert [size_named_by(token, (0, 0)) for token in tokens] == [
            (size.height, size.width) for size in group.data
        ]

    @pytest.mark.parametrize("token", [-1, 0, 128_043, 128_077, 130_102, 130_107, 1 << 40])
    def test_others_keep_the_prompts_size(
        self, token: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resolutions, "logger", logging.getLogger("test.resolutions"))
        with caplog.at_level(logging.WARNING):
            assert size_named_by(token, (480, 640)) == (480, 640)
        assert [record.getMessage() for record in caplog.records] == [
            f"Token {token} names no shape: it stays 480x640"
        ]

    def test_another_base_has_its_own_sizes(self) -> None:
        assert size_named_by(128_060, (0, 0), base_size=512) == (512, 512)


def test_the_extra_resolutions_are_those_of_the_row() -> None:
    assert [*NEW_SHAPES, *SQUARES] == list(EXTRA_RESOLUTIONS)
