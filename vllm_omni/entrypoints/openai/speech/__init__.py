# SPDX-License-Identifier: Apache-2.0
"""Text to speech over HTTP and WebSocket: what the routes of a speech pipeline share."""
