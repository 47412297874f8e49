"""One request's decision and its course: sessions, KV, load, gate and policies meet."""
