# SPDX-License-Identifier: Apache-2.0
"""Values of command-line flags, checked where they are read."""

import argparse


def positive_seconds(text: str) -> float:
    """A time above 0."""
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"should be a positive number of seconds, not {text}")
    return seconds


def positive_number(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"should be a positive number, not {text}")
    return number


def positive_int(text: str) -> int:
    """A whole number above 0."""
    number = int(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"should be a positive number, not {text}")
    return number


def count(text: str) -> int:
    """A whole number, 0 included."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"should be 0 or more, not {text}")
    return number
