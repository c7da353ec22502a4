# SPDX-License-Identifier: Apache-2.0
"""The project's one media codec: bytes of a client to arrays and back. No HTTP in here."""
