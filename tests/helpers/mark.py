# SPDX-License-Identifier: Apache-2.0
"""`hardware_test`: what a test needs of the machine (row I-01)."""

from collections.abc import Callable, Mapping

import pytest
import torch

TestFunction = Callable[..., object]


def hardware_test(
    *, res: Mapping[str, str], num_cards: int = 1
) -> Callable[[TestFunction], TestFunction]:
    """Mark a test with the platforms it runs on, and skip it where too few cards are there.

    Args:
        res: The card that each platform needs (`{"cuda": "H100"}`); only the platform's presence is
            checked here, the card is for whoever schedules the test.
        num_cards: How many cards.
    """

    def mark(test: TestFunction) -> TestFunction:
        for platform in res:
            test = getattr(pytest.mark, platform)(test)
        missing = "cuda" in res and torch.cuda.device_count() < num_cards
        return pytest.mark.skipif(missing, reason=f"needs {num_cards} of {dict(res)}")(test)

    return mark
