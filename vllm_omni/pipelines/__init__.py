# SPDX-License-Identifier: Apache-2.0
"""One file per model family: its stages, edges, prompts and defaults, as data."""
