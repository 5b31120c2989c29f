"""What is inside a page."""

from __future__ import annotations

import json
import re
from typing import Any


def page_data(page: str) -> Any:
    """The data that its scripts read."""
    [found] = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.S)
    return json.loads(found)


def script_bytes(page: str) -> int:
    """Size of its JavaScript."""
    return sum(len(code.encode()) for code in re.findall(r"<script>(.*?)</script>", page, re.S))
