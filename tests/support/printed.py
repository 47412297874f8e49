"""Tables as printed."""

CLASSES = ("WARM", "MEDIUM", "HEAVY_P2P", "HEAVY_COLO")
