"""Two tenants and their keys."""

from __future__ import annotations

SECRET = "0123456789abcdef0123456789abcdef"
