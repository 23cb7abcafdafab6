"""JSON documents that commands print."""

from typing import Any

Document = dict[str, Any]
