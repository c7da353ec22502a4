# SPDX-License-Identifier: Apache-2.0
"""The web page at `/playground`: its files, and what it is told of the loaded model."""
