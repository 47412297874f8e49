"""One request's decision and what becomes of it: sessions, KV, load, gate and policies meet."""
