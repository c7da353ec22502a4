# SPDX-License-Identifier: Apache-2.0
"""`WS /v1/realtime`: a conversation over one WebSocket, answered by the chat handler."""
