"""The instances, as far as it takes IO."""
