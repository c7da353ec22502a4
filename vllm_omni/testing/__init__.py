# SPDX-License-Identifier: Apache-2.0
"""Test support shipped with the package: tiny checkpoints and synthetic media, both offline."""
