# SPDX-License-Identifier: Apache-2.0
"""Text to speech: what is asked for, what a checkpoint offers, and how its prompts are made."""
